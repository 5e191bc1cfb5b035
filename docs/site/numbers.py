"""Numbers that pages quote, read from the committed records when the site is built and when the tests run."""

import json
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.document import replaced, table
from docs.site import reading, robots, scaling, speed, stability, studies, trust

ROOT = Path(__file__).parents[2]


VALUE = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- / -->)", re.S)
"""A number and its name, which readers of the Markdown do not see."""


def _json(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def _share(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _spread(rates: list[float]) -> str:
    share = f"{100 * mean(rates):.1f}"
    return f"{share} ± {100 * stdev(rates):.1f} %" if len(rates) > 1 else f"{share} % (one seed)"


def _stability(case: str, way: str = "as-trained") -> str:
    paths = sorted((ROOT / "docs/stability").glob(f"{case}-[0-9].json"))
    if not paths:
        raise ValueError(f"docs/stability has no record of {case}")
    return _spread([json.loads(path.read_text())["last"][way]["success"] for path in paths])


def _alarms(found: dict[str, float]) -> str:
    return f"{_share(found['mean'])} ± {_share(found['deviation'])}"


def _claim(name: str) -> dict[str, Any]:
    return _json(f"reproduction/results/{name}.json")


def _annealed(way: str) -> float:
    """Success of `annealed` on the particle by this way to act, one seed."""
    return _json("docs/annealed/particle-recipe-100.json")["ways"][way]["success"]


def _push_t(found: dict[str, Any]) -> dict[str, str]:
    """The table of docs/tasks.md in single numbers, and what the choice brings where draws are blurred."""

    def choice(recipe: str) -> str:
        middle, low, high = (-each for each in found[f"{recipe}, one draw"]["to as trained"])
        return f"{middle:.3f} ({min(low, high):.3f} to {max(low, high):.3f})".replace("-", "−")

    blurred = _json("docs/annealed/push-t-low-levels-large-jitter-100.json")["ways"]
    recipes = {"": "annealed", " mirrored": "annealed, mirrored", " steady": "steady", " mse": "mse"}
    return {
        **{f"push-t{name}": f"{found[f'{of}, as trained']['reward'][0]:.3f}" for name, of in recipes.items()},
        **{f"push-t{name} success": _share(found[f"{of}, as trained"]["success"][0]) for name, of in recipes.items()},
        **{
            f"push-t{name} seeds": str(len(found[f"{recipes[name]}, as trained"]["seeds"]))
            for name in ("", " mirrored")
        },
        "push-t one draw": f"{found['annealed, one draw']['reward'][0]:.3f}",
        "push-t choice": choice("annealed"),
        "push-t mirrored choice": choice("annealed, mirrored"),
        "push-t blurred one draw": f"{blurred['one draw']['metric'][0]:.3f}",
        "push-t blurred lowest": f"{blurred['lowest of 32']['metric'][0]:.3f}",
    }


STABILITY = ("2d-2000", "2d-300", "16d", "32d", "random-order", "random-order-history")


def ledger() -> dict[str, int]:
    """How many claims of the paper hold, fail, or are open."""
    verdicts = [
        _json(str(path.relative_to(ROOT)))["verdict"] for path in (ROOT / "reproduction/results").glob("[0-9]*.json")
    ]
    names = {"hold": "holds", "fail": "does not hold", "open": "inconclusive"}
    return {name: verdicts.count(verdict) for name, verdict in names.items()}


def front() -> list[tuple[str, str, str]]:
    """The front page's three numbers: the number, what it is, and the page that says how it was measured."""
    known = values()
    return [
        (
            known["stability steady-2d-2000"],
            "of episodes succeed: the default recipe on the 2-D particle task, five seeds of 200 held-out episodes",
            "stability.md",
        ),
        (known["act ms"], "for one action on one thread of a CPU, at the median", "performance.md"),
        (
            f"{known['claims hold']} of {known['claims']}",
            "claims of the paper hold when they are measured again",
            "results.md",
        ),
    ]


def tables() -> dict[str, str]:
    """The tables of docs/choose.md, and those of studies, by the name of their marks."""
    order = _claim("14-explicit")["measurements"]
    dims = _claim("09-dimensions")["measurements"]
    formulation = _claim("03-formulation")["measurements"]["success"]
    last = dims["dimensions"].index(16)
    drawn, near, lowest = (
        f"success {_spread([_annealed(way)])}" for way in ("one draw", "lowest within 0.7 d", "lowest of 32")
    )
    correct = f"success {_spread(formulation['correct'])}"
    long, ledger = "[stability](stability.md)", "[claim {}](../reproduction/results.md#{})"
    fourteen = ledger.format(14, "claim-14-explicit")
    nine = ledger.format(9, "claim-9-dimensions")
    skill = {name: f"skill {mean(dims['skill'][name][last]):.2f}" for name in ("ibc", "uniform", "gmm-nll")}
    plain = {name: f"success {_spread(rates)}" for name, rates in order["success"]["plain"].items()}
    reached = {name: f"a goal reached {_spread(rates)}" for name, rates in order["reached"]["random"].items()}
    head = ("your data", "recipe", "measured on the particle task", "record")
    steady = [
        ("2,000 demonstrations, 2 action columns", "`steady`", _stability("steady-2d-2000"), long),
        ("only 300 demonstrations", "`steady`", _stability("steady-2d-300"), long),
        ("16 action columns", "`steady`", _stability("steady-16d"), long),
        ("32 action columns", "`steady`", _stability("steady-32d"), long),
        ("several right answers for one observation", "`steady`", _stability("steady-random-order"), long),
        (
            "the same, and the past tells which answer is right",
            "`steady --inputs.history 8`",
            _stability("steady-random-order-history"),
            long,
        ),
    ]
    three = ledger.format(3, "claim-3-formulation")
    one, two = "one right answer, 300 demonstrations", "two right answers, 300 demonstrations"
    others = [
        *((one, f"`{name}`", plain[name], fourteen) for name in ("mse", "mdn", "ibc")),
        ("the same, with correct Langevin chains", "`correct`", correct, three),
        *((two, f"`{name}`", reached[name], fourteen) for name in ("mse", "mdn", "ibc")),
        *(("16 action columns", f"`{name}`", skill[name], nine) for name in ("ibc", "uniform", "gmm-nll")),
        *(
            ("2,000 demonstrations, 10,000 steps", f"`annealed`{how}", rate, "[annealed](annealed.md)")
            for how, rate in ((", one draw", drawn), ("", near), (", lowest of all 32", lowest))
        ),
    ]
    return {
        "steady": table(head, steady),
        "others": table(head, others),
        **studies.tables(),
        **trust.tables(),
        **scaling.tables(),
        **speed.tables(),
        **reading.tables(),
    }


def values() -> dict[str, str]:
    """Single numbers that pages quote, by the name in their marks `<!-- = NAME -->…<!-- / -->`."""
    integral = _claim("01-integral")["measurements"]["intervals"]
    temperature = _claim("02-langevin")["measurements"]["temperature"]
    formulation = _claim("03-formulation")["measurements"]["success"]
    reached = _claim("14-explicit")["measurements"]["reached"]["random"]
    thesis = _claim("15-thesis")["measurements"]
    push_t = _json("docs/tasks/push-t.json")["table"]
    rows = [json.loads(line) for line in (ROOT / "docs/performance.jsonl").read_text().splitlines()]
    single = ("act", "steady", 1, 1)
    act = next(r for r in rows if (r["bench"], r.get("trial"), r["threads"], r.get("batch")) == single)
    trusted = _json("docs/trust.json")
    eager = next(r for r in rows if (r["bench"], r.get("baseline"), r["threads"]) == ("compare", "eager", 1))
    step = next(r for r in rows if (r["bench"], r.get("trial"), r.get("setting")) == ("train", "ibc", "as it is"))
    chain = next(r for r in rows if (r["bench"], r["threads"]) == ("chain", 1))
    nothing = [json.loads(line) for line in (ROOT / "docs/from_nothing.jsonl").read_text().splitlines()]
    claims = ledger()
    return {
        **{f"stability steady-{case}": _stability(f"steady-{case}") for case in STABILITY},
        **robots.values(),
        **scaling.values(),
        **speed.values(),
        "act ms": f"{act['ms_p50']:.1f} ms",
        "demo seconds": f"{_json('docs/demo.json')['seconds']:.0f} s",
        "ibc gflop": f"{step['gflop']:.1f}",
        "ibc chain gflop": f"{chain['chain_gflops'] * chain['chain_ms'] / 1e3:.1f}",
        "ibc chain mb": f"{chain['peak_extra_mb']:.1f}",
        **{f"alarms of a {who}": _alarms(trusted[f"false alarms, {who}"]) for who in ("policy", "guard")},
        "asked episodes": _share(trusted["roll-outs that may ask"]["demonstrated goals"]["asked_episodes"]),
        **studies.banana(),
        "failing steps": str(trusted["failures"]["training steps"]),
        "failing share": _share(1 - trusted["failures"]["success"]),
        "guard ms": f"{trusted['guard']['milliseconds']['median']:.2f} ms",
        "eager ratio": f"{eager['ratio']:.2f}",
        **stability.values(),
        "from nothing seconds": f"{mean(row['seconds'] for row in nothing):.0f} s",
        "claims": str(sum(claims.values())),
        **{f"claims {name}": str(count) for name, count in claims.items()},
        **_push_t(push_t),
        "integral mixture": f"{integral['gaussian mixture'][0]:.2f}",
        "integral chains": f"{integral['ibc chains'][0]:.2f}",
        **{f"temperature {way}": f"{mean(each['double-well']):.3f}" for way, each in temperature.items()},
        **{f"success {way}": _share(mean(rates)) for way, rates in formulation.items()},
        **{f"reached {name}": _share(mean(rates)) for name, rates in reached.items()},
        "thesis runs": str(len(thesis["recipe"])),
        "thesis recipes": str(len(set(thesis["recipe"]))),
        "thesis correlation": f"{thesis['correlations']['bound-success'][0]:.2f}",
        "particle lowest": _share(_annealed("lowest of 32")),
        "particle one draw": _share(_annealed("one draw")),
        **{
            f"gallery {name} {what}": re.sub(r"^-", "−", number)
            for name, each in _json("docs/gallery/records.json").items()
            for what, number in each["numbers"].items()
        },
    }


def refreshed(text: str) -> str:
    """A page with its marked tables and numbers as the records have them."""
    for name, content in tables().items():
        if f"<!-- {name}: begin -->" in text:
            text = replaced(text, name, content)
    known = values() if VALUE.search(text) else {}

    def value(match: re.Match[str]) -> str:
        if match[2] not in known:
            raise ValueError(f"no record gives the number {match[2]!r}")
        return f"{match[1]}{known[match[2]]}{match[4]}"

    return VALUE.sub(value, text)
