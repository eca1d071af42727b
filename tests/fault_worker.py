"""The processes of ``test_faults.py``: one that is killed, one that resumes, and what they share.

``killed`` and ``resumed`` run every algorithm of the contract suite, in GRAPH_MODE those whose
state goes through the most variants and branches of the compiled step. Which of them makes its next
step is drawn at random (seeded), and after each step its checkpoint is saved; so one SIGKILL hits
each at a step of its own.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys

import contract
import mindspore as ms
import nets
import numpy as np
from mindspore import Tensor

from mindspore_boost_ext import read_history, save_checkpoint
from mindspore_boost_ext.callbacks.history import HistoryWriter

STEPS = contract.STEPS
DONE = "steps_done"
# Compiling and stepping take the time, and the contract suite shows of every algorithm that a run
# goes on from its state: killed are those whose state goes through most variants and branches.
STATEFUL = ("grad_accumulation", "grad_freeze, prefix", "thor, trace rule, dynamic loss scale")
MORE_STATEFUL = (*STATEFUL, "loss_scale_group", "dim_reduce, p-bfgs", "progressive_resizing")


def algorithms(run):
    """Return what is killed and resumed in a run: ``graph``, ``pynative``, ``every graph`` ..."""
    names = {"graph": STATEFUL, "pynative": MORE_STATEFUL}.get(run)
    return [one for one in contract.ALGORITHMS if names is None or one.name in names]


def file_of(folder, algorithm, suffix):
    return os.path.join(folder, f"{algorithm.name.replace(' ', '_')}.{suffix}")


def train_until(folder, algorithm, model, done, until):
    """Make the steps after ``done``, each with its record and its checkpoint."""
    writer = HistoryWriter(file_of(folder, algorithm, "jsonl"))
    step_cell = model.train_network
    for number, batch in enumerate(algorithm.batches(STEPS)[done:until], start=done + 1):
        (loss,) = contract.run(model, [batch])
        observed = step_cell.observations() if hasattr(step_cell, "observations") else {}
        writer.write({"event": "step", "step": number, "loss": loss, "boost": observed})
        path = file_of(folder, algorithm, "ckpt")
        save_checkpoint(step_cell, path, append_dict={DONE: number})
    writer.close()


def train_whole(folder, algorithm, model):
    """Train without interruption, write down losses and state, and put the start back."""
    step = model.train_network
    start = nets.weights(step)
    losses = contract.run(model, algorithm.batches(STEPS))
    np.savez(file_of(folder, algorithm, "npz"), **nets.weights(step))
    with open(file_of(folder, algorithm, "losses"), "w", encoding="utf-8") as file:
        json.dump(losses, file)
    nets.set_weights(step, start)


def killed(everyone, folder, seed):
    """Train all algorithms by turns, drawn at random, and die at a random moment.

    Before, each is trained without interruption; it then begins again, where it was compiled.
    """
    draw = random.Random(int(seed))
    models = [contract.switched_on(algorithm)[1] for algorithm in everyone]
    for algorithm, model in zip(everyone, models):
        train_whole(folder, algorithm, model)
    done = [0] * len(models)
    turns = draw.randint(len(models) * STEPS // 3, len(models) * STEPS // 2)
    for _ in range(turns):
        one = draw.choice([index for index, steps in enumerate(done) if steps < STEPS])
        train_until(folder, everyone[one], models[one], done[one], done[one] + 1)
        done[one] += 1
    # The dying step: trained and written down, its checkpoint is not saved any more.
    one = draw.choice([index for index, steps in enumerate(done) if steps < STEPS])
    batches = everyone[one].batches(STEPS)
    contract.run(models[one], batches[done[one] : done[one] + 1])
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(everyone, folder, _):
    """Finish what ``killed`` began, and tell what differs from its run without interruption."""
    results = {}
    for algorithm in everyone:
        path, done = file_of(folder, algorithm, "ckpt"), 0
        _, second = contract.switched_on(algorithm)
        if os.path.exists(path):
            saved = ms.load_checkpoint(path)
            done = int(saved.pop(DONE).asnumpy())
            missing, _ = ms.load_param_into_net(second.train_network, saved)
            assert not missing, missing
        train_until(folder, algorithm, second, done, STEPS)

        with np.load(file_of(folder, algorithm, "npz")) as whole:
            found = different(nets.weights(second.train_network), dict(whole))
        with open(file_of(folder, algorithm, "losses"), encoding="utf-8") as file:
            losses = json.load(file)
        results[algorithm.name] = {
            "resumed_at": done,
            "different": found,
            "history": [record["loss"] for record in last_of_each_step(folder, algorithm)],
            "losses": losses,
        }
    with open(os.path.join(folder, "results.json"), "w", encoding="utf-8") as file:
        json.dump(results, file)


def last_of_each_step(folder, algorithm):
    """Return one record a step: where a resumed run repeats one, the later counts."""
    records = {
        record["step"]: record for record in read_history(file_of(folder, algorithm, "jsonl"))
    }
    return [records[step] for step in sorted(records)]


def different(first, second):
    """Return the names of all Parameters that are not bit-identical, of ``nets.weights`` of two."""
    names = first.keys() | second.keys()
    same = [name for name in first.keys() & second.keys() if equal(first[name], second[name])]
    return sorted(names - set(same))


def equal(one, two):
    return one.dtype == two.dtype and np.asarray(one).tobytes() == np.asarray(two).tobytes()


# ---- killed while writing: children without end, each killed at a random moment ----


def writing_checkpoints(folder):
    """Save the numbers 0, 1, 2, ... as checkpoints of 4 MB in the same place."""
    number = 0
    while True:
        values = Tensor(np.full(1_000_000, number, np.float32))
        save_checkpoint([{"name": "values", "data": values}], os.path.join(folder, "run.ckpt"))
        number += 1


def writing_history(folder):
    """Append long records without end."""
    writer, number = HistoryWriter(os.path.join(folder, "history.jsonl")), 0
    while True:
        number += 1
        writer.write({"event": "step", "step": number, "text": "x" * 100_000})


def main(task, run, folder, seed):
    ms.set_context(mode=ms.PYNATIVE_MODE if run.endswith("pynative") else ms.GRAPH_MODE)
    {"killed": killed, "resumed": resumed}[task](algorithms(run), folder, seed)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"checkpoints": writing_checkpoints, "history": writing_history}[sys.argv[1]](sys.argv[2])
    else:
        main(*sys.argv[1:])
