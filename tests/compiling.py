"""MindSpore's compiler, without what it does again for every small network of the tests."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types

from mindspore import log
from mindspore.nn import cell


def spare():
    """Spare this process what is the same at every compilation."""
    inspect.getsourcelines = read_once(inspect.getsourcelines)
    log.debug = log.info = lambda *words, **settings: None  # for every node of a syntax tree
    # At each compilation all objects are looked at: those that are young are enough.
    # The compiler's modules have other names in each release.
    (parse,) = (one for name, one in sys.modules.items() if name.endswith("parse.parser"))
    parse.Parser.get_location = located_once(parse.Parser.get_location)
    api = sys.modules[type(cell._cell_graph_executor).__module__]
    api.gc = types.SimpleNamespace(collect=functools.partial(gc.collect, 1))


def read_once(found):
    """Keep the source of each function; by its code, which holds no network alive."""

    @functools.cache
    def of_code(code):
        return found(code)

    @functools.wraps(found)
    def getsourcelines(one):
        function = inspect.unwrap(getattr(one, "__func__", one)) if callable(one) else one
        code = getattr(function, "__code__", None)
        if code is None:
            return found(one)
        lines, start = of_code(code)
        return list(lines), start

    return getsourcelines


def located_once(found):
    """Keep the place of each syntax node in its source, and the node: its id stays its own."""
    places = {}

    @functools.wraps(found)
    def get_location(self, node):
        ends = (node[0], node[-1]) if isinstance(node, (list, tuple)) and node else (node,)
        key = (self.filename, self.line_offset, *map(id, ends))
        if key not in places:
            places[key] = node, found(self, node)
        return places[key][1]

    return get_location
