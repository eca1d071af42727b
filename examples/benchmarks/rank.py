"""A rank of ``processes.apart``: calls a function of a script; rank 0 writes what it returns."""

import importlib
import json
import sys
from pathlib import Path

from mindspore import communication

script, function, arguments, answer = sys.argv[1:]
module = importlib.import_module(script)
communication.init()  # the scheduler, which runs this as well, never comes past it
found = getattr(module, function)(*json.loads(arguments))
if communication.get_rank() == 0:
    Path(answer).write_text(json.dumps(found), "utf-8")
