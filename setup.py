"""Packages of megarl: `megarl/`, and `launch/` installed as `megarl.launch`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megarl", "megarl.*"]), "megarl.launch"],
    package_dir={"megarl": "megarl", "megarl.launch": "launch"},
)
