"""Each test registers what it needs and leaves nothing registered."""

import pytest

from torch_bcg.metadata.registration import REGISTERED


@pytest.fixture(autouse=True)
def registered_before():
    before = dict(REGISTERED)
    yield
    for cls, registration in list(REGISTERED.items()):
        if before.get(cls) is not registration:
            registration.remove()
