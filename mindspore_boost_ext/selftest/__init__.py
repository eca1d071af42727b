"""``python -m mindspore_boost_ext selftest``: does each algorithm compute what it should, here?"""
