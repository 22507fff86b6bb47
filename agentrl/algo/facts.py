"""Facts of an algorithm, stated beside its function, and the functions of a user's own file.

A decorator states the facts of an estimator, a loss, a correction or a filter; config, flow, rollout and learner read them from the
function. Nothing here loads torch, so that a configuration can be checked without it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, overload

from agentrl.algo.advantages import AdvantageOptions, DiscountedOptions
from agentrl.algo.flat import Flat, equal_in_all, never_flat
from agentrl.algo.options import NoOptions, checked_options, option_names
from agentrl.algo.token_losses import LossOptions, clip_options
from agentrl.core.errors import AgentRLError, ConfigError, PluginError
from agentrl.core.plugins import FORM, is_plugin, last_user_frame, load_plugin, suggest

F = TypeVar("F", bound=Callable[..., Any])
_FACTS = "agentrl_facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFacts:
    """Facts of an advantage estimator; see `advantage_estimator` for each."""

    options: type[AdvantageOptions] = AdvantageOptions
    compares_group: bool = False
    flat: Flat | None = None
    needs_critic: bool = False
    whitens: bool = False
    charges_kl: bool = False
    length_neutral: bool = False
    needs_teacher: bool = False
    token_baseline: bool = False
    greedy_baseline: bool = False

    @property
    def discounts(self) -> bool:
        """True if the estimator has a discount."""
        return "gamma" in option_names(self.options)

    @property
    def is_flat(self) -> Flat:
        """Function that says of which groups nothing is learned; `never_flat` if there are none."""
        return self.flat or (equal_in_all if self.compares_group else never_flat)

    @property
    def bootstraps(self) -> bool:
        """True if the estimator may be given the critic's values of states in which episodes were cut short."""
        return "bootstrap_truncated" in option_names(self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """Facts of a policy loss; see `policy_loss` for each."""

    options: type[Any] = LossOptions
    single_update: bool = False
    several_updates: bool = False
    selects: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFacts:
    """Facts of an off-policy correction; see `off_policy_correction` for each."""

    options: type[Any] = NoOptions
    whole_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewardFacts:
    """Facts of a reward of groups; see `group_reward` for each."""

    compares_group: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveFacts:
    """Facts of an objective of supervised or preference training; see `objective` for each."""

    unit: Literal["place", "row", "pair"]
    options: type[Any] = NoOptions
    reads: Literal["tokens", "divergence", "head"] = "tokens"
    figures: tuple[str, ...] = ()
    reference: bool = False
    prepare: Callable[..., Any] | None = None
    first_pass: Callable[..., bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterFacts:
    """Facts of a group filter; see `group_filter` for each."""

    compares_group: bool = False


@overload
def advantage_estimator(function: F, /) -> F: ...
@overload
def advantage_estimator(
    *,
    options: type[AdvantageOptions] | None = ...,
    compares_group: bool = ...,
    flat: Flat | None = ...,
    needs_critic: bool = ...,
    whitens: bool = ...,
    discounts: bool = ...,
    charges_kl: bool = ...,
    length_neutral: bool = ...,
    needs_teacher: bool = ...,
    token_baseline: bool = ...,
    greedy_baseline: bool = ...,
) -> Callable[[F], F]: ...
def advantage_estimator(
    function: F | None = None,
    /,
    *,
    options: type[AdvantageOptions] | None = None,
    compares_group: bool = False,
    flat: Flat | None = None,
    needs_critic: bool = False,
    whitens: bool = False,
    discounts: bool = False,
    charges_kl: bool = False,
    length_neutral: bool = False,
    needs_teacher: bool = False,
    token_baseline: bool = False,
    greedy_baseline: bool = False,
) -> Any:
    """Make a function of (`AdvantageInputs`, options) an advantage estimator.

    The function returns the advantage of every action token, or `Advantages` with targets for a critic.

    Args:
        function: The function, where the decorator is written without parentheses.
        options: Class of its options, a frozen dataclass that inherits from `AdvantageOptions`, the default. The estimator discounts if
            one of them is ``gamma``; otherwise ``--gamma`` must be 1.
        compares_group: It compares the episodes of a group, which must have at least 2 of them.
        flat: A function of (`GroupSummary` with the members of one agent, options) that is true where every token would get 0, for
            ``--flat-groups``. Default: with `compares_group`, groups of equal totals, components and turns; otherwise none.
        needs_critic: It reads ``inputs.values``, and returns the targets of the critic. If one of its options is
            ``bootstrap_truncated`` and that is true, it finds ``inputs.at_cut`` too.
        whitens: Its advantages are whitened over all tokens of the step after it returned.
        discounts: Without `options`: it reads ``options.gamma`` too.
        charges_kl: It subtracts ``inputs.kl``; otherwise a KL penalty must be part of the loss.
        length_neutral: It exists to treat short and long episodes alike, which ``--group-quorum`` would undo.
        needs_teacher: It teaches nothing by itself, so that ``--teacher`` must be given.
        token_baseline: Its baseline is made of tokens or turns of the group's episodes, so that one of which no token is trained
            (``--mask-truncated``) cannot be part of it.
        greedy_baseline: It reads ``inputs.baseline``: each task is also attempted greedily, in an episode that is not trained.

    Raises:
        TypeError: If `options` is no such class.
    """
    facts = EstimatorFacts(
        options=checked_options(options or (DiscountedOptions if discounts else AdvantageOptions), AdvantageOptions),
        compares_group=compares_group,
        flat=flat,
        needs_critic=needs_critic,
        whitens=whitens,
        charges_kl=charges_kl,
        length_neutral=length_neutral,
        needs_teacher=needs_teacher,
        token_baseline=token_baseline,
        greedy_baseline=greedy_baseline,
    )
    if discounts and not facts.discounts:
        raise TypeError(f"discounts=True, and options={facts.options.__name__} has no gamma; inherit from DiscountedOptions")
    return _stated(function, facts)


@overload
def policy_loss(function: F, /) -> F: ...
@overload
def policy_loss(
    *,
    options: type[Any] | None = ...,
    single_update: bool = ...,
    several_updates: bool = ...,
    clip: tuple[float, float] | None = ...,
    selects: Callable[..., Any] | None = ...,
) -> Callable[[F], F]: ...
def policy_loss(
    function: F | None = None,
    /,
    *,
    options: type[Any] | None = None,
    single_update: bool = False,
    several_updates: bool = False,
    clip: tuple[float, float] | None = (0.2, 0.2),
    selects: Callable[..., Any] | None = None,
) -> Any:
    """Make a function of (`LossInputs`, options) a policy loss.

    The function returns the loss of every action token, or `TokenLosses`.

    Args:
        function: The function, where the decorator is written without parentheses.
        options: Class of its options, a frozen dataclass; by default `LossOptions`, the two bounds of the ratio. Flags of other losses are
            refused.
        single_update: It has no ratio of new to old policy, and is right for one update per batch only.
        several_updates: It changes nothing in the first update of a batch, and is refused with one update per batch.
        clip: Without `options`: the defaults of ``options.eps_clip_low`` and ``options.eps_clip_high``; `None` if it reads neither.
        selects: A function of (`LossInputs`, options) that marks tokens of the whole batch before the first update, in a bool tensor.
            The loss finds them in ``inputs.selected``.

    Raises:
        TypeError: If `options` is no such class.
    """
    own = checked_options(options or clip_options(clip))
    return _stated(function, LossFacts(options=own, single_update=single_update, several_updates=several_updates, selects=selects))


@overload
def off_policy_correction(function: F, /) -> F: ...
@overload
def off_policy_correction(*, options: type[Any] = ..., whole_batch: bool = ...) -> Callable[[F], F]: ...
def off_policy_correction(function: F | None = None, /, *, options: type[Any] = NoOptions, whole_batch: bool = False) -> Any:
    """Make a function of (`CorrectionInputs`, options) an off-policy correction.

    The function returns the weight of every action token in the loss, or `TokenWeights`.

    Args:
        function: The function, where the decorator is written without parentheses.
        options: Class of its options, a frozen dataclass; none by default. Flags of other corrections are refused.
        whole_batch: It compares tokens of different rows, and is given the whole batch before the first update; others may be given a part
            of the rows at a time.

    Raises:
        TypeError: If `options` is no such class.
    """
    return _stated(function, CorrectionFacts(options=checked_options(options), whole_batch=whole_batch))


def objective(
    *,
    unit: Literal["place", "row", "pair"],
    options: type[Any] = NoOptions,
    reads: Literal["tokens", "divergence", "head"] = "tokens",
    figures: tuple[str, ...] = (),
    reference: bool = False,
    prepare: Callable[..., Any] | None = None,
    first_pass: Callable[..., bool] | None = None,
) -> Callable[[F], F]:
    """Make a function of (`RowScores`, options) an objective of supervised or preference training.

    The function returns the loss of each unit, to be minimised, or `RowLosses`.

    Args:
        unit: Each ``place`` that is read has a loss, each ``row``, or each ``pair``, whose two rows are always scored together.
        options: Class of its options, a frozen dataclass; none by default.
        reads: Output of the model at each place: log-probability of the next token, divergence from a teacher, or those of a new head.
        figures: Names of the figures that it wants of the distribution at each place.
        reference: It reads the log-probabilities of rows by a reference model.
        prepare: A function of (`StepRows`, options) that is given all rows of the step before its update; the values that it returns are
            among the columns of the rows.
        first_pass: A function of the options that is true if `prepare` wants the log-probabilities of the rows by the policy too. Where
            rows have companions, which are not trained, it is always given those of the companions.

    Raises:
        TypeError: If `options` is no such class.
    """
    rest: Any = {"reads": reads, "figures": figures, "reference": reference, "prepare": prepare, "first_pass": first_pass}
    return _stated(None, ObjectiveFacts(unit=unit, options=checked_options(options), **rest))  # type: ignore[no-any-return]


@overload
def group_filter(function: F, /) -> F: ...
@overload
def group_filter(*, compares_group: bool = ...) -> Callable[[F], F]: ...
def group_filter(function: F | None = None, /, *, compares_group: bool = False) -> Any:
    """Make a function of a `GroupSummary` a group filter.

    The function returns `None` to train on the group, or a short text, the reason to reject it, by which rejected groups are counted.

    Args:
        function: The function, where the decorator is written without parentheses.
        compares_group: It compares the episodes of a group, which must have at least 2 of them.
    """
    facts = FilterFacts(compares_group=compares_group)
    return _stated(function, facts)


@overload
def group_reward(function: F, /) -> F: ...
@overload
def group_reward(*, compares_group: bool = ...) -> Callable[[F], F]: ...
def group_reward(function: F | None = None, /, *, compares_group: bool = True) -> Any:
    """Make a function of `GroupAnswers` a reward of groups.

    The function returns one number for each answer, in their order. It runs on a thread, and may ask a judge.

    Args:
        function: The function, where the decorator is written without parentheses.
        compares_group: It compares the episodes of a group, which must have at least 2 of them.
    """
    return _stated(function, GroupRewardFacts(compares_group=compares_group))


def _stated(
    function: F | None, facts: EstimatorFacts | LossFacts | CorrectionFacts | FilterFacts | GroupRewardFacts | ObjectiveFacts
) -> Any:
    """Keep the facts with the function; without one, return the decorator that does."""
    if function is None:
        return lambda decorated: _stated(decorated, facts)
    setattr(function, _FACTS, facts)
    return function


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of function that a user may bring."""

    flag: str  # the flag that names it
    decorator: str  # name of the decorator that states its facts
    facts: type[Any]  # type of its facts
    arguments: tuple[str, ...]  # names of its arguments


ESTIMATOR = Kind("--advantage-estimator", "advantage_estimator", EstimatorFacts, ("inputs", "options"))
LOSS = Kind("--policy-loss", "policy_loss", LossFacts, ("inputs", "options"))
CORRECTION = Kind("--off-policy", "off_policy_correction", CorrectionFacts, ("inputs", "options"))
FILTER = Kind("--group-filter", "group_filter", FilterFacts, ("group",))
OBJECTIVE = Kind("--loss", "objective", ObjectiveFacts, ("scores", "options"))
GROUP_REWARD = Kind("--group-reward", "group_reward", GroupRewardFacts, ("group",))


def find(kind: Kind, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the function that a flag names: a built-in one, or the user's own as ``file.py:name``.

    Raises:
        ConfigError: If there is no such function, or it cannot be one of that kind.
    """
    if is_plugin(name):
        return _checked(kind, name, load_plugin(kind.flag, name))
    if name not in built_in:
        known = f"Choose one of {', '.join(built_in)}, or give file.py:name." if built_in else FORM
        raise ConfigError(kind.flag, name, "is not known", f"{suggest(name, built_in)} {known}".strip())
    return built_in[name]


def found_in(package: str, folder: Iterable[str], first: str, *, hyphens: bool = False) -> Mapping[str, Any]:
    """Return the functions with facts that the files of a package define, by their names there, file after file.

    Args:
        package: Name of the package.
        folder: Its ``__path__``.
        first: The name that comes first, as messages propose it.
        hyphens: Write names with hyphens.
    """
    found: dict[str, Any] = {}
    for each in sorted(pkgutil.iter_modules(folder), key=lambda each: each.name):
        module = importlib.import_module(f"{package}.{each.name}")
        for name, value in vars(module).items():
            # A file may also import a function of another one.
            if callable(value) and hasattr(value, _FACTS) and value.__module__ == module.__name__:
                found[name.replace("_", "-") if hyphens else name] = value
    return MappingProxyType({first: found.pop(first), **found})


def facts_of(function: Callable[..., Any]) -> Any:
    """Return the facts that a decorator stated."""
    return getattr(function, _FACTS)


def _checked(kind: Kind, spec: str, value: Any) -> Callable[..., Any]:
    """Check what a user's file holds under the name; nothing is called yet."""
    name, above = spec.rpartition(":")[2], f"Put @agentrl.{kind.decorator}() above a function of ({', '.join(kind.arguments)})."
    if not callable(value) or inspect.isclass(value):
        raise ConfigError(kind.flag, spec, f"{name} is {_article(value)}, not a function", above)
    if not isinstance(getattr(value, _FACTS, None), kind.facts):
        problem = f"{name} was not made by @agentrl.{kind.decorator}, so its facts are not known"
        raise ConfigError(kind.flag, spec, problem, above)
    if inspect.iscoroutinefunction(value):
        raise ConfigError(kind.flag, spec, f"{name} is a coroutine function", "Write it with a plain def.")
    try:
        inspect.signature(value).bind(*kind.arguments)
    except TypeError:
        problem = f"{name}{inspect.signature(value)} cannot be called with ({', '.join(kind.arguments)})"
        raise ConfigError(kind.flag, spec, problem, "Give it these arguments, in this order.") from None
    return value  # type: ignore[no-any-return]


def _article(value: Any) -> str:
    kind = "class" if inspect.isclass(value) else type(value).__name__
    return f"an {kind}" if kind[0] in "aeio" else f"a {kind}"


@contextmanager
def calls(kind: Kind, function: Callable[..., Any]) -> Iterator[None]:
    """Turn an exception of a user's function into an error that names the flag, the function and the line."""
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:
        # An exception of a built-in function is a bug of agentrl, and no user's file has to be named.
        if function.__module__.startswith("agentrl."):
            raise
        raised = f"raised {type(error).__name__}: {error} ({last_user_frame(error, _file(function))})"
        raise unusable(kind, function, raised, "Correct the function.") from error


def _file(function: Callable[..., Any]) -> str:
    return inspect.getfile(inspect.unwrap(function))


def unusable(kind: Kind, function: Callable[..., Any], problem: str, remedy: str) -> PluginError:
    """Return the error for a function that raised an exception, or returned a value that cannot be used."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return PluginError(f"{kind.flag}: {name} of {_file(function)} {problem}. {remedy}")
