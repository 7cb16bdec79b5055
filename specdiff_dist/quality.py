"""The `quality` field: a tier name, or an object that starts from a tier and overrides parts of its configuration.

    "fast"
    {"tier": "balanced", "leniency": 0.05, "effort": 2, "speculation": {"policy": "static", "length": 6}}

    tier               name of the row to start from
    rule, leniency     "lossless", "linear", "tv_budget", "cactus", "cactus_taylor", "lenience", "typical"
                       (core/rules.py); leniency 0 is exact, larger is looser
    max_tv_per_token,  hard bounds on the deviation, whatever the rule; once spent, decoding is exact
    tv_budget
    effort             denoising steps, or {num_denoising_steps, reveal_order, early_reveal}
    speculation        length (0: off), policy name, or {policy, …its fields}; policies (core/speculation.py): "off",
                       "static", "confidence_threshold", "additive", "failfast", "libraspec", "libraspec_measured"
    draft_temperature  number (default: the request's own)
    draft_top_k        tokens a proposal is truncated to before it is sampled from
    draft_ahead        true: the next round is drafted while this one is verified; pays where drafter and verifier do not share
                       their processor, for drafters that go by the tokens alone

One language for requests, deployment settings and the command line. `null` means "not given"; unknown keys are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from typing import Any, TypeVar, cast

from specdiff_dist.config import EARLY_REVEALS, REVEAL_ORDERS, DecodeConfig, Effort
from specdiff_dist.core.exactness import check_exact, is_exact
from specdiff_dist.core.rules import Cactus, Lenience, Linear, Lossless, Rule, TVBudget, Typical
from specdiff_dist.core.speculation import (
    Additive,
    ConfidenceThreshold,
    FailFast,
    LibraSpec,
    MeasuredLibraSpec,
    Off,
    Policy,
    Static,
    max_length,
)
from specdiff_dist.errors import InvalidConfig, InvalidRequest
from specdiff_dist.types import DrafterInfo

Built = TypeVar("Built")

SETTLED = Static(4)  # in place of a measured policy, see resolve_quality
EXACT_TIER = "exact"  # the one tier whose name is a promise, whatever the table says
RULES: dict[str, Callable[[float], Rule]] = {
    "lossless": lambda leniency: Lossless(),
    "linear": Linear,
    "tv_budget": TVBudget,
    "cactus": Cactus,
    "cactus_taylor": lambda leniency: Cactus(leniency, "taylor"),
    "lenience": Lenience,
    "typical": Typical,
}
POLICIES: dict[str, type[Policy]] = {
    "off": Off,
    "static": Static,
    "confidence_threshold": ConfidenceThreshold,
    "additive": Additive,
    "failfast": FailFast,
    "libraspec": LibraSpec,
    "libraspec_measured": MeasuredLibraSpec,
}

_FIELDS = (
    "rule",
    "leniency",
    "effort",
    "speculation",
    "draft_temperature",
    "draft_top_k",
    "max_tv_per_token",
    "tv_budget",
    "draft_ahead",
)


def rule_name(rule: Rule) -> str:
    """The rule's name in `quality.rule`."""
    if isinstance(rule, Cactus):
        return "cactus" if rule.gamma == "exact" else "cactus_taylor"
    return next(name for name, kind in RULES.items() if kind is type(rule)) if rule != Lossless() else "lossless"


def policy_name(policy: Policy) -> str:
    """The policy's name in `quality.speculation`."""
    return next(name for name, kind in POLICIES.items() if kind is type(policy))


def resolve_quality(
    value: str | Mapping[str, object] | None,
    *,
    default_tier: str,
    tiers: Mapping[str, DecodeConfig],
    drafter: DrafterInfo | None,
    greedy_draft: bool = False,
    is_seeded: bool = False,
) -> tuple[str, DecodeConfig]:
    """The tier and the configuration that a `quality` value means.

    Args:
        value: None means the default tier.
        drafter: facts to check the configuration against; None when not known.
        greedy_draft: drafts are greedy whatever the configuration says (temperature-0 requests).
        is_seeded: the caller chose the seed, which then is to fix the text. A tier's measured policy decides by the clock, so
            SETTLED takes its place where text is sampled; one that the request itself names stays.

    Raises InvalidRequest with the JSON path in `param`; InexactConfig when the exact tier cannot keep its promise.
    """
    overrides: Mapping[str, object] = {}
    name: object = value
    if isinstance(value, Mapping):
        name = value.get("tier")
        overrides = {key: part for key, part in value.items() if key != "tier"}
        if name is not None and not isinstance(name, str):
            raise InvalidRequest("quality.tier must be a string", param="quality.tier")
    if name is None:
        name = default_tier
    if not isinstance(name, str):
        raise InvalidRequest("quality must be a tier name or an object", param="quality")
    tier = check_tier(name, tiers, param="quality.tier" if isinstance(value, Mapping) else "quality")
    config = apply_overrides(tiers[tier], overrides)
    if overrides.get("speculation") is None:
        config = _settled(
            config, drafter, greedy_draft=greedy_draft, is_seeded=is_seeded, must_be_exact=tier == EXACT_TIER
        )
    if drafter is not None and config != tiers[tier]:
        _check_drafter_can(config, drafter, states_length=_states_length(overrides.get("speculation")))
    if tier == EXACT_TIER:
        check_exact(config, drafter, greedy_draft=greedy_draft)
    return tier, config


def _settled(
    config: DecodeConfig, drafter: DrafterInfo | None, *, greedy_draft: bool, is_seeded: bool, must_be_exact: bool
) -> DecodeConfig:
    """Without a measured policy where it is not wanted, or where other overrides would make it inexact."""
    if not isinstance(config.policy, MeasuredLibraSpec) or greedy_draft:
        return config
    settled = replace(config, policy=SETTLED)
    if is_seeded or (must_be_exact and not is_exact(config, drafter) and is_exact(settled, drafter)):
        return settled
    return config


def policy_fields(text: str, *, option: str) -> dict[str, Any]:
    """A policy on the command line, `name` or `name:{JSON object}`, as a `speculation` object; its fields are checked where
    it is used. Raises InvalidConfig that names the option."""
    name, _, rest = text.partition(":")
    try:
        given = json.loads(rest) if rest else {}
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"{option} {text}: {error.msg}; give it as name or name:{{JSON object}}") from error
    if not isinstance(given, Mapping):
        raise InvalidConfig(f"{option} {text}: what follows the name must be a JSON object")
    return {**given, "policy": name}


def check_tier(name: str, tiers: Iterable[str], *, param: str) -> str:
    """`name` itself, or InvalidRequest listing the tiers there are."""
    if name not in tiers:
        raise InvalidRequest(f"unknown quality tier {_shown(name)}; the tiers are {', '.join(tiers)}", param=param)
    return name


def apply_overrides(base: DecodeConfig, overrides: Mapping[str, object], *, param: str = "quality") -> DecodeConfig:
    """`base` with the given fields of a `quality` object (all but `tier`) replaced.

    Raises InvalidRequest; its `param` is the JSON path below `param`.
    """
    _check_keys(overrides, _FIELDS, param)
    given = {name: value for name, value in overrides.items() if value is not None}
    config = base
    if "rule" in given or "leniency" in given:
        config = replace(config, rule=_rule(base.rule, given, param))
    if "effort" in given:
        config = replace(config, effort=_effort(base.effort, given["effort"], f"{param}.effort"))
    if "speculation" in given:
        config = replace(config, policy=_policy(base.policy, given["speculation"], f"{param}.speculation"))
    if "draft_temperature" in given:
        path = f"{param}.draft_temperature"
        config = _checked(path, lambda: replace(config, draft_temperature=_number(given["draft_temperature"], path)))
    if "draft_top_k" in given:
        path = f"{param}.draft_top_k"
        config = _checked(path, lambda: replace(config, draft_top_k=_integer(given["draft_top_k"], path)))
    if "draft_ahead" in given:
        if not isinstance(given["draft_ahead"], bool):
            raise InvalidRequest("draft_ahead must be true or false", param=f"{param}.draft_ahead")
        config = replace(config, draft_ahead=given["draft_ahead"])
    for name in ("max_tv_per_token", "tv_budget"):
        if name in given:
            path = f"{param}.{name}"
            number = _number(given[name], path)
            changed = partial(replace, config, **{name: number})
            config = cast(DecodeConfig, _checked(path, changed))
    return config


def _rule(base: Rule, given: Mapping[str, object], param: str) -> Rule:
    leniency = _number(given["leniency"], f"{param}.leniency") if "leniency" in given else None
    if "rule" in given:
        name = _one_of(given["rule"], RULES, f"{param}.rule")
    else:
        name = "linear" if leniency and base == Lossless() else rule_name(base)
    if name == "lossless" and leniency:
        raise InvalidRequest("the lossless rule has leniency 0; ask for rule 'linear'", param=f"{param}.leniency")
    if leniency is None and name not in ("lossless", rule_name(base)):
        if base != Lossless():  # leniencies of different rules are different things
            raise InvalidRequest(f"rule {name!r} needs a leniency", param=f"{param}.leniency")
        leniency = 0.0
    return _checked(f"{param}.leniency", lambda: RULES[name](base.leniency if leniency is None else leniency))


def _effort(base: Effort, value: object, param: str) -> Effort:
    if not isinstance(value, Mapping):
        steps = _integer(value, param, "an integer (denoising steps) or an object")
        return _checked(param, lambda: replace(base, num_denoising_steps=steps))
    _check_keys(value, ("num_denoising_steps", "reveal_order", "early_reveal"), param)
    steps, order, early = base.num_denoising_steps, base.reveal_order, base.early_reveal
    if value.get("num_denoising_steps") is not None:
        steps = _integer(value["num_denoising_steps"], f"{param}.num_denoising_steps")
    if value.get("reveal_order") is not None:
        order = _one_of(value["reveal_order"], REVEAL_ORDERS, f"{param}.reveal_order")
    if value.get("early_reveal") is not None:
        early = _one_of(value["early_reveal"], EARLY_REVEALS, f"{param}.early_reveal")
    return _checked(f"{param}.num_denoising_steps", lambda: Effort(steps, order, early))


def _policy(base: Policy, value: object, param: str) -> Policy:
    is_short = False  # a bare length: then the whole field is what is wrong
    if isinstance(value, str):
        value = {"policy": value}
    elif not isinstance(value, Mapping):
        length = _integer(value, param, "a length, a policy name or an object")
        kept = {} if hasattr(base, "length") else {"policy": "static"}
        value, is_short = ({"policy": "off"} if length == 0 else {**kept, "length": length}), True
    given = {name: part for name, part in value.items() if part is not None}
    name = _one_of(given.pop("policy", policy_name(base)), POLICIES, f"{param}.policy")
    kind = POLICIES[name]
    known = {field.name: field for field in fields(kind)}
    every = {field.name for policy in POLICIES.values() for field in fields(policy)}
    _check_keys(given, every, param)
    for key in given:
        if key not in known:
            raise InvalidRequest(f"policy {name!r} has no {key}", param=f"{param}.{key}")
    built: dict[str, Any] = {
        key: _POLICY_READERS[str(known[key].type)](part, f"{param}.{key}") for key, part in given.items()
    }
    for key in known.keys() - built.keys():
        if hasattr(base, key):  # what is not given stays as the tier has it
            built[key] = getattr(base, key)
        elif key == "length" and isinstance(base, MeasuredLibraSpec):
            built[key] = SETTLED.length
        elif known[key].default is MISSING:
            raise InvalidRequest(f"policy {name!r} needs a {key}", param=f"{param}.{key}")
    try:
        return kind(**built)
    except InvalidConfig as error:
        wrong = next((key for key in known if str(error).startswith(f"{key} must")), "policy")
        raise InvalidRequest(str(error), param=param if is_short else f"{param}.{wrong}") from None


def _states_length(speculation: object) -> bool:
    """Whether an override says how many tokens, instead of leaving it to a policy's default."""
    if isinstance(speculation, Mapping):
        return any(speculation.get(key) is not None for key in ("length", "max_length"))
    return isinstance(speculation, int)


def _check_drafter_can(config: DecodeConfig, drafter: DrafterInfo, *, states_length: bool) -> None:
    """An override the drafter cannot follow is refused, not quietly bent; a policy's own default ends where the drafter
    does."""
    if isinstance(config.policy, Off):
        return
    length = max_length(config.policy)
    if states_length and length > drafter.max_draft_tokens:
        raise InvalidRequest(
            f"drafter {drafter.name!r} drafts at most {drafter.max_draft_tokens} tokens, not {length}",
            param=f"quality.speculation.{'length' if hasattr(config.policy, 'length') else 'max_length'}",
        )
    if config.effort.reveal_order not in drafter.reveal_orders:
        raise InvalidRequest(
            f"drafter {drafter.name!r} reveals in order {', '.join(drafter.reveal_orders)}, "
            f"not {config.effort.reveal_order}",
            param="quality.effort.reveal_order",
        )


def _checked(param: str, build: Callable[[], Built]) -> Built:
    """Builds a self-checking value; what it objects to becomes an InvalidRequest at `param`."""
    try:
        return build()
    except InvalidConfig as error:
        raise InvalidRequest(str(error), param=param) from None


def _check_keys(value: Mapping[str, object], known: Iterable[str], param: str) -> None:
    for key in value:
        if key not in known:
            raise InvalidRequest(f"unknown field {_shown(key)} in {param}", param=param)


def _number(value: object, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{param} must be a number", param=param)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{param} must be a finite number", param=param)
    return number


def _integer(value: object, param: str, what: str = "an integer") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{param} must be {what}", param=param)
    return value


_POLICY_READERS: dict[str, Callable[[object, str], object]] = {
    "int": _integer,
    "float": _number,
    "str": lambda value, param: _string(value, param),
}


def _string(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string", param=param)
    return value


def _one_of(value: object, names: Iterable[str], param: str) -> str:
    if _string(value, param) not in names:
        raise InvalidRequest(f"{param} must be one of {', '.join(names)}", param=param)
    return str(value)


def _shown(name: object) -> str:
    """A caller's string, safe to print: ASCII, short."""
    text = ascii(name)
    return text if len(text) <= 64 else f"{text[:60]}...'"
