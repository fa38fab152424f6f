import pytest
from ranks import RankGroup


@pytest.fixture(scope="session")
def ranks():
    """ranks(n): a group of n gloo ranks shared by all tests of the session."""
    groups: dict[int, RankGroup] = {}

    def get(world_size: int) -> RankGroup:
        return groups.setdefault(world_size, RankGroup(world_size))

    yield get
    for group in groups.values():
        group.close()


def pytest_collection_modifyitems(items):
    for item in items:
        if "/dist/" in str(item.path):
            item.add_marker(pytest.mark.dist)
