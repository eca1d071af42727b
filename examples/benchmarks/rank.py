"""A process of ``processes.apart``: calls a function of a script; rank 0 writes what it returns."""

import importlib
import json
import os
import sys
from pathlib import Path

script, module, function, arguments, answer = sys.argv[1:]
sys.argv[:] = [script]  # so that other code takes this for the script that runs
found, rank = getattr(importlib.import_module(module), function), 0
if "MS_ROLE" in os.environ:
    from mindspore import communication

    communication.init()  # the scheduler, which runs this, too, never gets past this line
    rank = communication.get_rank()
result = found(*json.loads(arguments))
if rank == 0:
    Path(answer).write_text(json.dumps(result), "utf-8")
