"""CONTRACT 9: which runs a state resumes, what may change in between, what it costs, and what it refuses."""

from __future__ import annotations

import io
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.samplers import BlendedBatchSampler, DistributedBatchSampler
from hp_nodes.state import LoaderState, differences
from hp_nodes.transport import run_ranks
from tests.reference_order import step_records
from tests.saved_states import SAVED, Records, path_of, recorded, resumed, whole_records
from tests.scenes import Scene, pickled

SIZE, STEP = 52, 16
MODES = ("online", "metadata", "repack")


class Text:
    """Record i has tokens of value i + 1, in one or two documents."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 1 + index * 7 % 13
        ends = [0, length] if index % 2 else [0, max(1, length // 2), length + 1]
        tokens = torch.full((ends[-1],), index + 1)
        return {"input_ids": tokens, "labels": tokens, "cu_seq_lens": ends}


def loader_of(mesh: Any, mode: str = "online", *, micro: int | None = None, **config: Any) -> DistributedDataLoader:
    """A ready-made loader of each mode over the same 52 records, three steps of 16 an epoch."""
    ranks = mesh.get_coordinate()[0], mesh.size(0)
    micro = micro or 2
    sampler = DistributedBatchSampler(SIZE, micro, STEP, *ranks, order="shuffle", seed=3)
    given: dict[str, Any] = {"metadata_fn": lambda record: SampleMetadata(1 + record % 5), "collate_fn": list}
    dataset: Any = Records(SIZE)
    if mode == "metadata":
        config["metadata_mode"] = True
        given = {"metadata": [SampleMetadata(1 + record % 5) for record in range(SIZE)], "collate_fn": list}
    if mode == "repack":
        dataset, given, config["repack_sequences"] = Text(), {}, True
    else:
        given["cost_model"] = lambda metadata: WorkloadCost(llm=float(metadata.pack_tokens**2))
    settings = DistributedDatasetConfig(seq_len=16, local_batch_size=micro, timeout_s=20.0, **config)
    return build_distributed_dataloader(dataset, mesh, settings, batch_sampler=sampler, **given)


def contents(batch: Any) -> list[int]:
    """Records in a micro-batch; of text, one number a token."""
    if isinstance(batch, dict):
        return [int(token) - 1 for token in batch["input_ids"].flatten() if token]
    return list(batch)


def steps_of(loader: DistributedDataLoader, limit: int | None = None) -> Iterator[tuple[int, int, list[int]]]:
    """(epoch, step, contents) of the rest of an epoch, step by step."""
    held: list[int] = []
    given = 0
    for batch in loader:
        held += contents(batch)
        assert loader.last is not None
        if loader.last.ends_step:
            yield loader.last.epoch, loader.last.step, held
            held, given = [], given + 1
            if given == limit:
                return


def together(of_ranks: Sequence[Sequence[tuple[int, int, list[int]]]]) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) → sorted contents over all ranks."""
    found: dict[tuple[int, int], list[int]] = {}
    for steps in of_ranks:
        for epoch, step, held in steps:
            found.setdefault((epoch, step), []).extend(held)
    return {place: sorted(held) for place, held in found.items()}


def expected(mode: str, epoch: int, step: int) -> list[int]:
    records = step_records(step, STEP, SIZE, 3, epoch)
    return sorted(r for r in records for _ in range(len(Text()[r]["input_ids"]) if mode == "repack" else 1))


def run_from(
    state: Any, ranks: dict[str, int], *, epochs: int = 1, limit: int | None = None, **options: Any
) -> tuple[dict[tuple[int, int], list[int]], Any]:
    """Steps from a state on (None: the beginning) over the constructors, and the state after them."""

    def run(mesh: Any) -> tuple[list[Any], Any, bool]:
        with loader_of(mesh, **options) as loader:
            if state is not None:
                loader.load_state_dict(pickled(state))
            steps = [step for _ in range(epochs) for step in steps_of(loader, limit)]
            return steps, loader.state_dict(), loader.last is not None and loader.last.positions is not None

    results = run_ranks(ranks, run)
    assert len({json.dumps(after, sort_keys=True) for _, after, _ in results}) == 1  # the same on every rank
    return together([steps for steps, _, constructs in results if constructs]), results[0][1]


def states_of(mode: str, ranks: int) -> list[tuple[int, Any]]:
    """(micro-batches delivered, state) at every position of an epoch."""

    def run(mesh: Any) -> list[tuple[int, Any]]:
        with loader_of(mesh, mode) as loader:
            states = [(0, loader.state_dict())]
            states += [(number + 1, loader.state_dict()) for number, _ in enumerate(loader)]
        return states

    results = run_ranks({"dp": ranks}, run)
    assert all(states == results[0] for states in results)
    return results[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_position_on_any_number_of_ranks(mode: str, ranks: int) -> None:
    states = states_of(mode, ranks)
    rounds = STEP // (2 * ranks)
    assert len(states) == 3 * rounds + 1
    distinct = {}
    for delivered, state in states:
        boundary = delivered // rounds
        assert distinct.setdefault(boundary, state) == state  # within a step it is the one of its beginning
    for wanted in (1, 2, 4):
        for boundary, state in distinct.items():
            found, _ = run_from(state, {"dp": wanted}, mode=mode)
            epoch, first = (0, boundary) if boundary < 3 else (1, 0)
            assert found == {(epoch, step): expected(mode, epoch, step) for step in range(first, 3)}


layouts = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([{"dp": 1}, {"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}]),
        "micro": st.sampled_from([1, 2, 4]),
        "mode": st.sampled_from(["online", "metadata"]),
        "balance_window_size": st.integers(1, 5),
        "host_prefetch_depth": st.integers(0, 3),
        "objective": st.sampled_from(["lockstep", "makespan", "balance"]),
        "broadcast_plan": st.booleans(),
        "limit": st.integers(1, 3),
    }
)


@given(st.lists(layouts, min_size=3, max_size=4))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_resume_of_a_resume_of_a_resume_with_everything_changed(runs: list[dict[str, Any]]) -> None:
    """Ranks, model peers, micro-batch, window, prefetch, mode, objective: the steps are those of one run."""
    state, place = None, (0, 0)
    for options in runs:
        ranks, limit = options.pop("ranks"), options.pop("limit")
        found, state = run_from(state, ranks, limit=limit, **options)
        for (epoch, step), records in found.items():
            assert (epoch, step) == place
            assert records == expected("online", epoch, step)
            place = (epoch, step + 1) if step < 2 else (epoch + 1, 0)


@pytest.mark.parametrize("says_epochs", [False, True])
def test_loops_over_epochs_go_on_from_any_position(says_epochs: bool) -> None:
    """Before the first step, in the middle, at the last step, at the end; a step of one round, a window of one step."""

    def loop(loader: DistributedDataLoader, first: int, states: list[Any] | None) -> list[Any]:
        found = []
        for epoch in range(first, 3):
            if says_epochs:
                loader.set_epoch(epoch)
            for batch in loader:
                found.append((loader.last.epoch, loader.last.step, list(batch)))
                if states is not None:
                    states.append((epoch, loader.state_dict()))
        return found

    def run(mesh: Any) -> None:
        def fresh() -> DistributedDataLoader:
            return whole_records(mesh, DistributedBatchSampler(10, 3, 3, 0, 1, order="shuffle"), 10)

        with fresh() as loader:
            states: list[Any] = [(0, loader.state_dict())]
            whole = loop(loader, 0, states)
        assert len(whole) == 9
        for position, (epoch, state) in enumerate(states):
            with fresh() as loader:
                loader.load_state_dict(pickled(state))
                # Without set_epoch a finished epoch leaves nothing, so the loop has one epoch less to go.
                ended = position and position % 3 == 0 and not says_epochs
                assert loop(loader, epoch + bool(ended), None) == whole[position:], position

    run_ranks({"dp": 1}, run)


# ---- costs


@pytest.mark.parametrize("consumed", [0, 10**6, 10**12 - 64])
def test_restoring_is_instant_and_reads_nothing(consumed: int) -> None:
    """Under 10 ms and 2 KiB at any record of 10**12; the first batch reads its own window only."""

    class Huge(Records):
        reads = 0

        def __getitem__(self, index: int) -> int:
            Huge.reads += 1
            return index

    def run(mesh: Any) -> tuple[float, int, int]:
        size = 10**12
        sampler = DistributedBatchSampler(size, 4, 32, 0, 1, order="shuffle")
        config = DistributedDatasetConfig(seq_len=8, local_batch_size=4, balance_window_size=2, host_prefetch_depth=0)
        loader = build_distributed_dataloader(
            Huge(size),
            mesh,
            config,
            batch_sampler=sampler,
            metadata_fn=lambda record: SampleMetadata(1, cost=WorkloadCost(llm=1)),
        )
        state = json.loads(loader.state_dict()["hp_nodes"])
        state["nodes"]["WindowSampler"]["consumed_samples"] = consumed
        text = {"hp_nodes": json.dumps(state)}
        times = []
        for _ in range(5):
            before = time.perf_counter()
            loader.load_state_dict(text)
            times.append(time.perf_counter() - before)
        assert Huge.reads == 0
        next(loader)
        assert loader.last is not None
        assert loader.last.step == consumed // 32
        return min(times), len(loader.state_dict()["hp_nodes"]), Huge.reads

    ((seconds, nbytes, reads),) = run_ranks({"dp": 1}, run)
    assert seconds < 0.010
    assert nbytes <= 2048
    assert reads == 8


def test_torch_save_with_weights_only() -> None:
    _, state = run_from(None, {"dp": 2}, limit=2)
    buffer = io.BytesIO()
    torch.save({"loader": state}, buffer)
    buffer.seek(0)
    found, _ = run_from(torch.load(buffer, weights_only=True)["loader"], {"dp": 4})
    assert list(found) == [(0, 2)]


# ---- what a state must agree with


def one_rank(fn: Any) -> Any:
    return run_ranks({"dp": 1}, fn)[0]


def test_a_global_batch_that_the_layout_cannot_divide_names_the_layouts_that_could() -> None:
    with pytest.raises(
        ValueError, match="multiple of 6.* 16 can be divided with micro_batch_size 2 on 1, 2, 4 or 8 ra"
    ):
        DistributedBatchSampler(SIZE, 2, STEP, 0, 3)
    with pytest.raises(ValueError, match="divided with micro_batch_size 1, 2 or 4 on 4 ranks"):
        DistributedBatchSampler(SIZE, 3, STEP, 0, 4)
    _, state = run_from(None, {"dp": 2}, limit=1)

    def run(mesh: Any) -> None:
        sampler = DistributedBatchSampler(SIZE, 2, 18, mesh.get_rank(), 3, order="shuffle", seed=3)
        loader = whole_records(mesh, sampler, SIZE)
        with pytest.raises(ValueError, match="global_batch_size: saved 16, now 18") as caught:
            loader.load_state_dict(state)
        assert "a global batch of 16 can be divided with micro_batch_size 1 on 1, 2, 4, 8 or 16 ranks" in str(
            caught.value
        )

    run_ranks({"dp": 3}, run)


def fingerprinted(mesh: Any, **fingerprint: Any) -> DistributedDataLoader:
    return DistributedDataLoader(Scene().graph(mesh), fingerprint=fingerprint)


def test_a_users_own_fingerprint() -> None:
    def run(mesh: Any) -> None:
        with fingerprinted(mesh, dataset_revision="v3") as loader:
            next(loader)
            state = loader.state_dict()
        assert LoaderState.from_text(state["hp_nodes"]).fingerprint["dataset_length"] == 48
        with fingerprinted(mesh, dataset_revision="v3") as same:
            same.load_state_dict(state)
        for other, said in (({"dataset_revision": "v4"}, "'v4'"), ({}, "nothing")):
            with fingerprinted(mesh, **other) as loader:
                with pytest.raises(ValueError, match=f"dataset_revision: saved 'v3', now {said}; with strict=False"):
                    loader.load_state_dict(state)
                with pytest.warns(UserWarning, match=f"dataset_revision: saved 'v3', now {said}"):
                    loader.load_state_dict(state, strict=False)
        with pytest.raises(ValueError, match="fingerprint 'seed' is 9, but the graph says 5"):
            fingerprinted(mesh, seed=9)

    one_rank(run)


def test_every_differing_field_is_named_one_by_one() -> None:
    one = {"seed": 1, "sampler": {"order": "shuffle", "total_samples": 4}}
    other = {"seed": 1, "sampler": {"order": "sequential", "total_samples": 4}, "mine": None}
    assert list(differences(one, other)) == ["sampler.order", "mine"]
    assert differences(one, other)["sampler.order"] == ("shuffle", "sequential")
    assert differences(one, one) == {}


def sequential(mesh: Any, size: int, records: int | None = None, step: int = 4, **config: Any) -> DistributedDataLoader:
    return whole_records(mesh, DistributedBatchSampler(size, 2, step, 0, 1), records or size, **config)


def test_what_is_safe_is_accepted_with_a_warning_and_nothing_else_is() -> None:
    def run(mesh: Any) -> None:
        with sequential(mesh, 12) as loader:
            fresh = loader.state_dict()
            for _ in range(2):
                next(loader)
            middle = loader.state_dict()
            list(loader)
            ended = loader.state_dict()

        def accepted(state: Any, **changed: Any) -> list[Any]:
            with sequential(mesh, **{"size": 12, **changed}) as loader:
                with pytest.raises(ValueError, match="belongs to other data: .*with strict=False it is accepted"):
                    loader.load_state_dict(state)
                with pytest.warns(UserWarning, match="accepted though it differs: "):
                    loader.load_state_dict(state, strict=False)
                return [*loader]

        def refused(state: Any, match: str, **changed: Any) -> None:
            with sequential(mesh, **{"size": 12, **changed}) as loader:
                for strict in (True, False):
                    with pytest.raises(ValueError, match=match) as caught:
                        loader.load_state_dict(state, strict=strict)
                    assert "strict=False" not in str(caught.value)
                assert next(loader) == [0, 1]

        assert accepted(middle, seed=9) == [[4, 5], [6, 7], [8, 9], [10, 11]]  # the samples' randomness, not the order
        assert accepted(middle, records=20) == [[4, 5], [6, 7], [8, 9], [10, 11]]  # records were appended
        refused(middle, "dataset_length: saved 12, now 20; .*sampler.total_samples: saved 12, now 20", size=20)
        refused(middle, "global_batch_size: saved 4, now 6", step=6)
        assert len(accepted(fresh, size=20)) == 10  # nothing of the epoch has been consumed
        assert len(accepted(ended, size=9, step=2)) == 4  # nothing of it is left: the next one is another order's
        with sequential(mesh, 12) as loader, warnings.catch_warnings():
            warnings.simplefilter("error")
            loader.load_state_dict(middle, strict=False)  # nothing differs
            assert next(loader) == [4, 5]

    one_rank(run)


def test_an_entry_of_a_node_that_is_gone_is_dropped_only_when_asked() -> None:
    def run(mesh: Any) -> None:
        with Scene().loader(mesh) as loader:
            next(loader)
            state = json.loads(loader.state_dict()["hp_nodes"])
            state["nodes"]["Filter"] = {"seen": 3}
            text = {"hp_nodes": json.dumps(state)}
            with pytest.raises(ValueError, match=r"entries \['Filter'\]"):
                loader.load_state_dict(text)
            with pytest.warns(UserWarning, match="no node 'Filter'"):
                loader.load_state_dict(text, strict=False)
            assert loader.last is not None

    one_rank(run)


def test_a_state_of_a_later_version_is_refused() -> None:
    def run(mesh: Any) -> None:
        with Scene().loader(mesh) as loader:
            text = loader.state_dict()["hp_nodes"].replace('"version":1', '"version":2')
            with pytest.raises(ValueError, match="version 2; this release reads versions 1 to 1"):
                loader.load_state_dict({"hp_nodes": text}, strict=False)

    one_rank(run)


@pytest.mark.parametrize("name", sorted(SAVED))
def test_states_of_every_version_so_far_resume_to_what_followed_then(name: str) -> None:
    kept = json.loads(path_of(name, version=1).read_text(encoding="utf-8"))
    assert resumed(name, kept["state"]) == kept["next"]


def test_a_state_file_is_what_the_loader_writes_today() -> None:
    """So that the files of this version stay what they claim to be: a change of the format needs a new version."""
    for name in ("shuffled", "blended"):
        kept = json.loads(path_of(name).read_text(encoding="utf-8"))["state"]["hp_nodes"]
        assert LoaderState.from_text(recorded(name)["state"]["hp_nodes"]) == LoaderState.from_text(kept)


# ---- blending


@pytest.mark.parametrize("on_end", ["stop", "repeat"])
def test_a_blend_resumes_on_any_number_of_ranks(on_end: str) -> None:
    sizes = [30, 12, 6]

    def run(mesh: Any, state: Any, limit: int | None) -> tuple[list[Any], Any]:
        sampler = BlendedBatchSampler(
            sizes, [0.6, 0.3, 0.1], 1, 4, mesh.get_rank(), mesh.size(), order="shuffle", on_end=on_end
        )
        with whole_records(mesh, sampler, sum(sizes)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return list(steps_of(loader, limit)), loader.state_dict()

    whole = together([run_ranks({"dp": 1}, lambda mesh: run(mesh, None, None))[0][0]])
    state, found = None, {}
    for ranks in (2, 4, 1):
        limit = 3 if ranks > 1 else None
        results = run_ranks({"dp": ranks}, lambda mesh, state=state, limit=limit: run(mesh, state, limit))
        found |= together([steps for steps, _ in results])
        state = results[0][1]
        assert len(state["hp_nodes"]) <= 2048
    assert found == whole
