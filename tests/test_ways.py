"""How a step is computed: in which precision, by torch.compile or not, with how many threads."""

import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cebm.arithmetic import check_precision, reducing, speed_of_half, why_not_half
from cebm.cli import main
from cebm.composition import vary
from cebm.energies import MLP, ModuleEnergy, Residual
from cebm.recipes import TRIALS
from cebm.runs import checkpoints, load_checkpoint, load_metrics, resume, train
from cebm.spaces import Specification
from cebm.threads import SPINS, choose, counts, wait_shortly
from cebm.trainer import Trainer
from cebm.ways import Way, Ways, fastest
from test_runs import comparable, contents, small_job
from test_trainer import make_trainer, same_state, small

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.out}


class Types(TorchDispatchMode):
    """Notes in which type matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS:
            self.seen.append(args[-1].dtype)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def own_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("name", TRIALS)
def test_bf16_reaches_the_products_of_every_recipe_and_nothing_else(name: str) -> None:
    """Forward and backward; losses, weights, energies and the optimiser stay in float32."""
    plain, half = (make_trainer(small(TRIALS[name], precision=p), steps=20) for p in ("float32", "bf16"))
    with Types() as before:
        wanted = plain.step()
    with Types() as after:
        found = half.step()
    assert torch.bfloat16 not in before.seen
    if name == "nearest":  # it has no network
        assert not after.seen
        return
    assert after.seen.count(torch.bfloat16) >= 3
    assert torch.float32 in after.seen or name == "annealed"  # rounds its whole network
    assert found.keys() == wanted.keys()
    assert all(value.dtype == torch.float32 for value in found.values())
    # The same random numbers: the losses differ by rounding alone, which is 1/256 a product.
    torch.testing.assert_close(found["loss"], wanted["loss"], rtol=0.05, atol=0.05)
    assert not torch.equal(found["loss"], wanted["loss"])
    state = half.state()
    assert all(value.dtype != torch.bfloat16 for value in state.values())
    assert state.keys() == plain.state().keys()


@pytest.mark.parametrize("settings", [MLP(64), MLP(64, hidden_layers=4), MLP(64, hidden_layers=1), Residual(64)])
def test_slopes_in_bf16_are_those_of_float32_up_to_rounding(settings: Any, generator: torch.Generator) -> None:
    """Block by block, as chains compute them, and as a whole; the types of what comes out are those that went in."""
    energy = settings.build(Specification.flat(3, 2), generator)
    with torch.no_grad():
        for weight in energy.parameters():
            weight.mul_(3)
    obs, actions = torch.randn(700, 3, generator=generator), torch.randn(700, 8, 2, generator=generator)
    with torch.no_grad():
        exact, slopes = energy.energies_and_gradients(energy.encode(obs), actions)
        with reducing(True):
            energies, gradients = energy.energies_and_gradients(energy.encode(obs), actions)
            few = energy.energies_and_gradients(energy.encode(obs[:5]), actions[:5])
            alone = energy(obs, actions)
    for one, other in ((energies, exact), (gradients, slopes), (few[1], slopes[:5]), (alone, exact)):
        assert one.dtype == torch.float32
        error = (one - other).square().mean().sqrt() / other.square().mean().sqrt()
        # 2⁻⁹ for each factor; units whose sign turns by that change slopes by more. A lost layer makes it 1.
        assert error < 0.2
    hidden = getattr(settings, "hidden_layers", 2) > 1
    assert torch.equal(energies, exact) != hidden


def test_a_module_of_ones_own_multiplies_by_torchs_rules(generator: torch.Generator) -> None:
    class Network(torch.nn.Sequential):
        def forward(self, features: Tensor, actions: Tensor) -> Tensor:
            return super().forward(torch.cat([features, actions], -1))

    energy = ModuleEnergy(Network(torch.nn.Linear(5, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)), 3, 2)
    obs, actions = torch.randn(4, 3, generator=generator), torch.randn(4, 6, 2, generator=generator)
    with reducing(True), Types() as seen:
        energies = energy(obs, actions)
    assert energies.dtype == torch.float32 and torch.bfloat16 in seen.seen
    torch.testing.assert_close(energies, energy(obs, actions), rtol=0.05, atol=0.05)


def test_a_precision_that_a_device_lacks_is_refused_and_measured_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cebm.ways.why_not_half", lambda device: "this processor only imitates bfloat16")
    with pytest.raises(
        ValueError, match=r"precision 'bf16': this processor only imitates bfloat16; take 'float32', or"
    ):
        make_trainer(small(TRIALS["ibc"], precision="bf16"))
    trainer = make_trainer(small(TRIALS["ibc"], precision="measured"))
    trainer.step()
    assert trainer.learner.ways.taken() == Way()
    with pytest.raises(ValueError, match="precision must be 'float32', 'bf16' or 'measured', got 'half'"):
        check_precision("half")


def test_a_device_is_asked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "meta" not in why_not_half(torch.device("cpu"))
    assert 0.005 < speed_of_half(torch.device("cpu"), 64) < 50
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert why_not_half(torch.device("cpu")) == (
        "this processor only imitates bfloat16, which is many times slower than float32"
    )

    def no_such(*_: object) -> Tensor:
        raise RuntimeError('"mm" not implemented for\n BFloat16')

    monkeypatch.setattr(torch, "mm", no_such)
    assert why_not_half(torch.device("cpu")) == 'cpu has no bfloat16 ("mm" not implemented for BFloat16)'


# ---------------------------------------------------------------------------------------------- the choice


def test_a_later_way_must_be_worth_it() -> None:
    assert fastest({0: 1.0, 1: 0.99}) == 0 and fastest({0: 1.0, 1: 0.9}) == 1
    assert fastest({0: 1.0, 1: 0.5, 2: 0.6, 3: 0.4}) == 3 and fastest({1: 2.0}) == 1
    assert [str(way) for way in Ways("measured", True).all] == [
        "float32",
        "float32, compiled",
        "bf16",
        "bf16, compiled",
    ]
    assert Ways("float32", False).taken() == Way() and not Ways("bf16", False).state_dict()


@pytest.mark.parametrize("faster", [0, 1])
def test_what_was_measured_is_kept_and_resumed(faster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement takes no step; another trainer that takes up the state goes the same way, whatever is faster."""
    trial = small(TRIALS["ibc"], precision="measured")
    monkeypatch.setattr("cebm.trainer.fastest", lambda seconds: faster)
    whole, fixed = make_trainer(trial), make_trainer(vary(trial, precision=("float32", "bf16")[faster]))
    whole.rehearse()
    assert whole.step_count == 0 and whole.learner.ways.taken() == Way(half=bool(faster))
    for _ in range(3):
        assert torch.equal(whole.step()["loss"], fixed.step()["loss"])
    monkeypatch.setattr("cebm.trainer.fastest", lambda seconds: 1 - faster)
    broken = make_trainer(trial)
    broken.step()  # the other way
    assert broken.learner.ways.taken() == Way(half=not faster)
    broken.load_state(whole.state(), 3)
    for _ in range(2):
        assert torch.equal(whole.step()["loss"], broken.step()["loss"])
    same_state(whole.state(), broken.state())


@pytest.mark.parametrize("precision", ["bf16", "measured"])
def test_a_run_in_bf16_that_was_stopped_goes_on_bit_for_bit(precision: str, tmp_path: Path) -> None:
    job = small_job("steady", precision=precision)
    train(job, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    newest, *others = checkpoints(tmp_path / "broken")
    shutil.rmtree(newest)
    shutil.rmtree(tmp_path / "broken" / "policy")
    assert load_checkpoint(others[0])[0]["step"] == 18
    resume(tmp_path / "broken")
    rows = [load_metrics(tmp_path / name) for name in ("whole", "broken")]
    assert comparable(rows[0]) == comparable(rows[1])
    for name in ("policy", "best"):
        assert contents(tmp_path / "whole" / name) == contents(tmp_path / "broken" / name)


# ---------------------------------------------------------------------------------------------- torch.compile


def test_where_compiling_fails_training_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that fails has already taken random numbers; they are given back."""

    def broken_compiler(function: Any, **_: Any) -> Any:
        def run(obs: Tensor, actions: Tensor, generator: torch.Generator) -> Any:
            torch.rand(7, generator=generator)
            raise RuntimeError("there is no\n C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken_compiler)
    trial = small(TRIALS["ibc"])
    plain, compiled = make_trainer(trial), make_trainer(vary(trial, compiled=True))
    with pytest.warns(UserWarning, match=r"the step is not compiled, .* fails here: there is no C\+\+ compiler"):
        first = compiled.step()
    assert compiled.learner.ways.taken() == Way()
    assert torch.equal(first["loss"], plain.step()["loss"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(compiled.step()["loss"], plain.step()["loss"])


def test_errors_of_a_step_are_not_blamed_on_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    trainer = make_trainer(small(TRIALS["ibc"], compiled=True))
    trainer.step()
    with torch.no_grad():
        next(iter(trainer.learner.energy.parameters()))[0, 0] = torch.nan
    with warnings.catch_warnings(), pytest.raises(ValueError, match="NaN"):
        warnings.simplefilter("error")
        trainer.step()


def test_a_run_that_was_compiled_goes_on_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("cebm.trainer.fastest", lambda seconds: 1)
    trial = small(TRIALS["mdn"], compiled=True)
    whole, other = make_trainer(trial), make_trainer(trial)
    whole.step()
    assert whole.learner.ways.taken() == Way(compiled=True)

    def no_compiler(function: Any, **_: Any) -> Any:
        raise RuntimeError("nothing here")

    monkeypatch.setattr(torch, "compile", no_compiler)
    other.load_state(whole.state(), 1)
    with pytest.warns(UserWarning, match="not compiled"):
        loss = other.step()["loss"]
    assert torch.equal(loss, whole.step()["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ibc", "steady"])
def test_a_compiled_step_is_the_same_up_to_rounding(name: str) -> None:
    """With torch's own compiler, where there is one for C++."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    trial = small(TRIALS[name])
    plain, compiled = make_trainer(trial, steps=20), make_trainer(vary(trial, compiled=True), steps=20)
    for _ in range(3):
        found = compiled._step(Way(compiled=True))
        torch.testing.assert_close(found["loss"], plain.step()["loss"], rtol=1e-3, atol=1e-4)
    assert not compiled._compiled.broken


# ---------------------------------------------------------------------------------------------- threads


def test_the_numbers_of_threads_to_try() -> None:
    assert [counts(most) for most in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


@pytest.mark.parametrize(("pace", "best"), [({1: 3, 2: 1, 4: 2}, 2), ({1: 1, 2: 4, 4: 4}, 1), ({1: 4, 2: 2, 4: 1}, 4)])
def test_the_fastest_number_of_threads_is_kept(pace: dict[int, int], best: int, own_threads: None) -> None:
    found = choose(lambda: time.sleep(0.004 * pace[torch.get_num_threads()]), 4, seconds=0.01, rounds=2)
    assert found.threads == torch.get_num_threads() == best
    assert found.words().startswith(f"{best} thread") and "as fast" in found.words()
    with pytest.raises(ValueError, match="most must be at least 1"):
        choose(lambda: None, 0)


def test_choosing_threads_takes_no_step_and_forgives_steps_that_fail(
    monkeypatch: pytest.MonkeyPatch, own_threads: None
) -> None:
    trial = small(TRIALS["ibc"])
    trainer, other = make_trainer(trial), make_trainer(trial)
    torch.set_num_threads(1)
    assert trainer.choose_threads().startswith("1 thread")
    assert trainer.step_count == 0
    same_state(trainer.state(), other.state())
    monkeypatch.setattr(Trainer, "step", lambda self: (_ for _ in ()).throw(FloatingPointError("loss is nan")))
    assert trainer.choose_threads() == "1 threads, as the first steps fail: loss is nan"


def test_training_says_how_many_threads_it_chose_and_a_resumed_run_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_threads: None
) -> None:
    """Unless the user says a number, or OMP_NUM_THREADS does."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("cebm.threads.SECONDS", 0.01)
    tiny = ["--steps", "4", "--energy.width", "8", "--optimiser.batch-size", "16", "--evaluation-episodes", "1"]
    tiny += ["--acting.candidates", "2", "--evaluation-candidates", "2"]
    torch.set_num_threads(2)

    def run(*more: str) -> tuple[int, str]:
        main(["train", "uniform", *tiny, "--out", str(tmp_path / str(len(list(tmp_path.iterdir())))), *more])
        threads = [json.loads((path / "run.json").read_text())["threads"] for path in sorted(tmp_path.iterdir())]
        return threads[-1], capsys.readouterr().out

    number, said = run()
    assert number in (1, 2) and f"{number} thread" in said and "as measured now" in said
    torch.set_num_threads(2)
    assert run("--threads", "1")[0] == 1
    torch.set_num_threads(2)
    main(["train", "--resume", str(tmp_path / "1"), "--steps", "6"])
    assert torch.get_num_threads() == 1
    capsys.readouterr()
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    number, said = run()
    assert number == 2 and "as measured" not in said


def test_waiting_threads_spin_for_a_moment_only_unless_the_user_says() -> None:
    given: list[dict[str, str]] = [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}]
    for environment in given:
        wait_shortly(environment)
    assert given == [{"GOMP_SPINCOUNT": SPINS}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}]
