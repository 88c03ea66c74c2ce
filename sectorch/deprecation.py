"""Old forms of the public API, each of which works for one release with a warning that spells the new form."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def deprecate(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that an old form of the API is in use.

    Args:
        old: the form that the caller wrote.
        new: what to write in its place.
        stacklevel: as of `warnings.warn`; 3 is the line that called the function that calls this one.

    Warns:
        DeprecationWarning: always.
    """
    warnings.warn(f"{old} is {new} now; the old form goes with the next release", DeprecationWarning, stacklevel)


def rename_arguments(**names: str) -> Callable[[F], F]:
    """Let a function take keyword arguments by their old names too.

    The signature shows the new names only.

    Args:
        names: old name=new name.
    """

    def decorator(f: F) -> F:
        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in [name for name in kwargs if name in names]:
                new = names[old]
                call_name = f.__qualname__.removesuffix(".__init__")
                if new in kwargs:
                    raise TypeError(f"{call_name}() got both '{new}' and its old name '{old}'")
                deprecate(f"{call_name}(..., {old}=)", f"{call_name}(..., {new}=)")
                kwargs[new] = kwargs.pop(old)
            return f(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return decorator


def renamed_attribute(old: str, new: str) -> Any:
    """A property that reads an attribute by its old name."""

    def read(self: Any) -> Any:
        deprecate(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`, for this release.")


C = TypeVar("C", bound=type)


def renamed_fields(**names: str) -> Callable[[C], C]:
    """Let a dataclass take and give its fields by their old names too.

    Args:
        names: old name=new name. The class keeps them as `renamed_fields`.
    """

    def decorator(cls: C) -> C:
        cls.__init__ = rename_arguments(**names)(cls.__init__)
        for old, new in names.items():
            setattr(cls, old, renamed_attribute(old, new))
        cls.renamed_fields = names  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorator


def renamed_names(module: str, **names: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that gives its classes and functions by their old names too.

    Args:
        module: the module's name.
        names: old name=new name.
    """

    def read(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        deprecate(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return read


MOVED_MODULES: dict[str, tuple[str, dict[str, str]]] = {
    f"sectorch.{old}": (f"sectorch.{new}", names)
    for old, new, names in (
        ("choreography.parties", "choreography.roles", {}),
        ("choreography.program.text", "choreography.program.trace", {}),
        ("choreography.steps", "choreography.net", {}),
        ("ckks.errors", "errors", {}),
        ("data.errors", "errors", {}),
        ("dp.errors", "errors", {}),
        ("federated.errors", "errors", {}),
        ("federated.scores", "federated.outcome", {}),
        ("garbled.confident", "garbled.argmax", {}),
        ("garbled.gates", "garbled.circuit", {}),
        ("garbled.shares", "garbled.argmax", {}),
        ("mpc.smooth", "mpc.series", {}),
        ("mpc.smooth.normalise", "mpc.series", {}),
        ("mpc.smooth.trigonometric", "mpc.series", {}),
        ("mpc.star.claims", "mpc.star.dealing_proofs", {"settle": "prove_pending"}),
        ("mpc.star.fours", "mpc.star.maximum", {}),
        ("mpc.star.largest", "mpc.star.maximum", {}),
        ("mpc.star.mask", "mpc.star.masking", {}),
        ("mpc.star.pool", "mpc.star.maximum", {}),
        ("mpc.star.share", "mpc.star.shares", {}),
        ("mpc.star.sign", "mpc.star.thresholds", {}),
        ("mpc.star.streamed", "mpc.star.linear", {"mask_streamed": "mask_streamed_weight"}),
        ("mpc.star.within", "mpc.star.thresholds", {}),
        ("network.parties.stage", "testing.local_network", {}),
        ("nn.describe", "serving.description", {}),
        ("nn.model_file", "serving.model_file", {}),
        ("nn.program", "serving.description", {}),
        ("nn.served", "nn.remote_program", {"Served": "RemoteProgram"}),
        ("plots", "display", {}),
        ("privacy", "dp", {}),
        ("protocols.capride.directions", "protocols.capride.settings", {}),
        ("protocols.capride.meter", "protocols.capride.training", {}),
        ("protocols.perturbation.data", "protocols.perturbation.settings", {}),
        ("protocols.perturbation.federated", "protocols.perturbation.experiment", {}),
        ("protocols.perturbation.masks", "secure_sum", {"Opening": "MaskOpening"}),
        ("protocols.privhfl.privacy", "protocols.privhfl.settings", {}),
        ("protocols.secsv.training", "federated.training", {"Training": "LocalTraining"}),
        ("ring.scheme", "config", {}),
    )
}
"""Old name of a module: the module that has its contents now, and what is renamed there (old name: new name)."""


class MovedModules:
    """An import finder and loader of modules by the names in `MOVED_MODULES`.

    It stands last in `sys.meta_path`, so it is asked for a module only after every other finder had none.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # a package, since a moved module may be the parent of another one
        return ModuleSpec(name, MovedModules, is_package=True) if name in MOVED_MODULES else None  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let the import system make the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name, names = MOVED_MODULES[module.__name__]
        moved = importlib.import_module(name)
        module.__getattr__ = lambda old: getattr(moved, names.get(old, old))  # pyright: ignore[reportAttributeAccessIssue]
        if not any(old.startswith(f"{module.__name__}.") for old in MOVED_MODULES):  # else its part says so
            deprecate(module.__name__, name)


sys.meta_path.append(MovedModules)  # pyright: ignore[reportArgumentType]
