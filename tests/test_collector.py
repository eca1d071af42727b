"""The import leaves Python's garbage collector as it was."""

from __future__ import annotations

import pytest
import scripts

IMPORTS = """
import gc
{before}
import mindspore_boost_ext
from mindspore_boost_ext import _collector
print(gc.get_freeze_count() > 1000, _collector._HOLDS)
"""


@pytest.mark.parametrize(("before", "is_users"), [("", False), ("gc.freeze()", True)])
def test_the_import_holds_no_objects_and_releases_none(tmp_path, before, is_users):
    """Neither what it has held meanwhile stays held, nor is let go what the user holds."""
    done = scripts.run("-c", IMPORTS.format(before=before), cwd=tmp_path)
    assert done.stdout.split() == [str(is_users), str(not is_users)], done.stderr[-2000:]
