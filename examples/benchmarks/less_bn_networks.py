"""How many BatchNorms the built-in pass and LessBN leave, for networks of MindCV.

    python examples/benchmarks/less_bn_networks.py             # one or two of each family
    python examples/benchmarks/less_bn_networks.py resnet18 res2net50
    python examples/benchmarks/less_bn_networks.py --all --timeout 900

Each network has a process and a time limit of its own. **There** is MindSpore's compiler pass:
``mindspore.boost.LessBN`` around the network with its loss, in a Momentum step compiled on CPU. It
counts the BatchNorms in the compiled forward pass, by the names of their weights. **Here** is
``less_bn`` on another copy, which compiles nothing. **Only there** are those that the pass removes
and we keep, with our most frequent reason ("5 of 10: ..."). **Why the others stay** is our most
frequent reason for all that we keep, without the last one of each branch.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from processes import apart

# The smallest of each family that has BatchNorms, two where its members differ in their blocks.
NETWORKS = [
    *("cmt_tiny", "densenet121", "dpn92", "efficientnet_b0", "efficientnet_v2_s", "ghostnet_050"),
    *("halonet_50t", "hrnet_w32", "inception_v3", "inception_v4", "mixnet_s", "mnasnet_050"),
    *("mobilenet_v1_025", "mobilenet_v2_035_96", "mobilenet_v3_small_075", "mobilevit_xx_small"),
    *("nasnet_a_4x1056", "pnasnet", "regnet_x_200mf", "regnet_y_200mf", "repmlp_t224"),
    *("repvgg_a0", "res2net50", "res2net50_v1b", "resnest14", "resnet18", "resnet50"),
    *("resnetv2_50", "resnext50_32x4d", "rexnet_09", "senet154", "seresnet18", "seresnet50"),
    *("shufflenet_v1_g3_05", "shufflenet_v2_x0_5", "skresnet18", "skresnet50", "visformer_tiny"),
    *("volo_d1", "xception", "xcit_tiny_12_p16_224"),
]
LAST = "last BatchNorm of its residual branch"
CLASSES = 10


def image_side(name: str) -> int:
    """Return the side of the images that a network of MindCV is made for."""
    from mindcv.models.registry import get_pretrained_cfg

    usual = 299 if name.startswith(("inception", "xception", "nasnet", "pnasnet")) else 224
    return int(get_pretrained_cfg(name).get("input_size", (3, usual, usual))[-1])


def names_in_dump(text: str) -> list[str]:
    """Return the names of the BatchNorms in an IR file of a compiled graph, one for each call."""
    calls = re.findall(r"= *PrimFunc_BatchNorm\((.*)", text)
    found = [re.search(r"%para\d+_([\w.]+)\.(?:gamma|weight)\b", call) for call in calls]
    return [match[1] if match else "" for match in found]


def there(name: str, folder: str) -> dict[str, Any]:
    """Compile a training step with the built-in pass; return the BatchNorms left.

    The package must not be imported in this process: it puts its own LessBN there.
    """
    dumps = {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_DUMP_IR_PASSES": "validate"}
    os.environ.update(dumps, MS_DEV_SAVE_GRAPHS_PATH=folder)
    import mindspore as ms
    import numpy as np
    from mindcv.models import create_model
    from mindspore import Tensor, boost, nn

    class WithLoss(nn.WithLossCell):
        """Adds the loss; if there are auxiliary classifiers, it takes only the main one."""

        def construct(self, images: Tensor, labels: Tensor) -> Tensor:
            logits = self._backbone(images)
            return self._loss_fn(logits[0] if isinstance(logits, tuple) else logits, labels)

    ms.set_context(mode=ms.GRAPH_MODE)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    network = boost.LessBN(WithLoss(create_model(name, num_classes=CLASSES), loss))
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.01, momentum=0.9)
    images = np.zeros((2, 3, *[image_side(name)] * 2), np.float32)
    step = nn.TrainOneStepCell(network, optimizer).set_train()
    step.compile(Tensor(images), Tensor(np.zeros(2, np.int32)))
    (dump,) = Path(folder).rglob("*_validate_*.ir")
    left = names_in_dump(dump.read_text())
    return {"left": [one.removeprefix("network._backbone.") for one in left]}


def here(name: str) -> dict[str, Any]:
    """Rewrite a network with this package; return all its BatchNorms, and why some are left."""
    from mindcv.models import create_model

    from mindspore_boost_ext.less_batch_normalization.rewrite import less_bn

    network = create_model(name, num_classes=CLASSES)
    # The built-in LessBN renames parameters so: in some networks they have other names.
    norms = [item for item in network.cells_and_names() if hasattr(item[1], "moving_mean")]
    paths = {cell.gamma.name.removesuffix(".gamma"): path for path, cell in norms}
    changes = less_bn(network).changes
    kept = {paths[one.name]: one.reason for one in changes if one.done == "kept"}
    return {"all": [paths[one.name] for one in changes], "left": kept}


def in_own_process(timeout: float, function: Callable[..., Any], *words: str) -> dict[str, Any]:
    """Call ``there`` or ``here`` in a process of its own; say what failed."""
    try:
        return apart(function, *words, quiet=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {timeout:g} s"}
    except RuntimeError as error:
        errors = [line for line in str(error).splitlines() if "Error: " in line]
        return {"failure": (errors or ["died"])[-1][:200]}


def most(reasons: Sequence[str]) -> str:
    """Return the most frequent reason, with its number and that of all; "0" if there are none."""
    if not reasons:
        return "0"
    (reason, count), *others = Counter(reasons).most_common()
    return f"{count} of {len(reasons)}: {reason}" if others else f"{count}: {reason}"


def row(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return the line of one network in the table."""
    if "failure" in ours:
        return f"{name} |  |  | fails |  | {ours['failure']}"
    kept = ours["left"]
    left, only = "does not compile", ""
    if "failure" not in theirs:
        left = str(len(theirs["left"]))
        only = most([why for one, why in kept.items() if one not in theirs["left"]])
    others = most([why for why in kept.values() if why != LAST])
    return f"{name} | {len(ours['all'])} | {left} | {len(kept)} | {only} | {others}"


def sums(rows: Sequence[str]) -> str:
    """Return in how many of the networks that the pass compiles we leave fewer, as many, more."""
    left = [row.split(" | ")[2:4] for row in rows]
    more = [int(ours) - int(theirs) for theirs, ours in left if theirs.isdigit()]
    return (
        f"Of {len(more)} networks that the pass compiles, this package leaves fewer in "
        f"{sum(one < 0 for one in more)}, as many in {more.count(0)}, more in "
        f"{sum(one > 0 for one in more)}."
    )


def main() -> None:
    """Measure the networks and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("networks", nargs="*", help="names as mindcv.list_models() has them")
    parser.add_argument("--all", action="store_true", help="every network of MindCV")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each network")
    options = parser.parse_args()
    names = options.networks or NETWORKS
    if options.all:
        import mindcv

        names = mindcv.list_models()
    from harness import print_table

    rows = []
    for name in names:
        ours = in_own_process(options.timeout, here, name)
        if ours.get("all") == []:
            continue
        with tempfile.TemporaryDirectory() as folder:  # dumps go with it even if a process dies
            theirs = in_own_process(options.timeout, there, name, folder)
        rows.append(row(name, theirs, ours))
        print(rows[-1], theirs.get("failure", ""), sep=" | ", file=sys.stderr, flush=True)
    headings = "network | BatchNorms | there | here | only there | why the others stay"
    print_table("BatchNorms left by the built-in pass (there) and by LessBN (here)", headings, rows)
    print(f"\n{sums(rows)}")


if __name__ == "__main__":
    main()
