"""``python -m graphs.inspect CHECKPOINT``: where a saved run stands, what comes next, and what must stay the same.

    python -m graphs.inspect runs/a/step_00000012
    python -m graphs.inspect runs/a/step_00000012 --ranks 8 --micro-batch-size 2 --steps 4
    python -m graphs.inspect --diff runs/a/step_00000012 runs/b/step_00000012

Takes a directory of ``torch.distributed.checkpoint``, a file of ``torch.save``, or a JSON text. ``--diff`` ends with
code 1 when the two differ, as ``diff`` does.
"""

from __future__ import annotations

import sys

if __name__ == "inspect":
    # A program in this directory was started as a file, so its directory is searched first, and somebody wants the
    # standard library's module of this name.
    import importlib.util
    import sysconfig

    spec = importlib.util.spec_from_file_location("inspect", f"{sysconfig.get_path('stdlib')}/inspect.py")
    assert spec is not None and spec.loader is not None
    sys.modules["inspect"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
else:
    import argparse
    from collections.abc import Sequence

    from graphs.saved_state import describe_state, read_checkpoint, state_differences

    __all__ = ["main"]

    def main(arguments: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser("python -m graphs.inspect", description=__doc__.split("\n", 1)[0])
        parser.add_argument("checkpoint", nargs="?", help="directory or file")
        parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="what differs between two checkpoints")
        parser.add_argument("--ranks", type=int, help="data-parallel ranks that the next steps are shown for")
        parser.add_argument("--micro-batch-size", type=int, help="records of a round on a rank (default: one round)")
        parser.add_argument("--steps", type=int, default=2, help="how many of the next steps to show")
        options = parser.parse_args(arguments)
        if (options.checkpoint is None) == (options.diff is None):
            parser.error("give one checkpoint, or --diff and two")
        for name in ("ranks", "micro_batch_size"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; accepted: an int >= 1")
        try:
            return show_difference(*options.diff) if options.diff else show(options)
        except ValueError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2

    def show(options: argparse.Namespace) -> int:
        for loader, leaves in read_checkpoint(options.checkpoint).items():
            for key, text in leaves.items():
                print(".".join(filter(None, (loader, key))))
                page = describe_state(
                    text, ranks=options.ranks, steps=options.steps, micro_batch_size=options.micro_batch_size
                )
                print(page)
        return 0

    def show_difference(first: str, second: str) -> int:
        one, other = read_checkpoint(first), read_checkpoint(second)
        lines = []
        for loader in dict.fromkeys([*one, *other]):
            prefix = f"{loader}." if loader else ""
            lines += [f"{prefix}{line}" for line in state_differences(one.get(loader, {}), other.get(loader, {}))]
        print("\n".join(lines) if lines else "no difference")
        return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
