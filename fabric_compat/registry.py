"""The registries of strategies and accelerators by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class Registry(dict[str, dict[str, Any]]):
    """The classes that the user and fabric have registered in this process, by name.

    An entry is a dict. A subclass sets ``_kind``, the key of the class in an entry, such as
    ``"strategy"``.

    Args:
        builtins: the classes or functions that make fabric's own objects, by name.
    """

    _kind: ClassVar[str]

    def __init__(self, builtins: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> None:
        super().__init__()
        self._builtins = builtins
        for name, factory in builtins.items():
            self._add(name, factory)

    def _add(self, name: str, factory: Any, description: str = "", **init_params: Any) -> None:
        """Add an entry, whose keys are those of Lightning's registries."""
        self[name] = {
            self._kind: factory,
            f"{self._kind}_name": name,
            "description": description,
            "init_params": init_params,
        }

    def register(
        self,
        name: str,
        factory: Any = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class, and return it. Without a class, return a decorator of a class.

        Args:
            name: the name.
            factory: the class, or a function that returns an object.
            description: a text for people.
            override: whether to replace a class of the same name.
            **init_params: the keyword arguments that :meth:`get` passes to the class.

        Raises:
            ValueError: there is a class of this name, and ``override`` is false.
        """
        if name in self and not override:
            raise ValueError(f"{name!r} is registered already: register(..., override=True)")

        def register_class(decorated: Any) -> Any:
            self._add(name, decorated, description, **init_params)
            return decorated

        if factory is None:
            return register_class
        return register_class(factory)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a new object of the class of this name. Without such a class, return ``default``.

        Raises:
            KeyError: there is no such class, and ``default`` is None.
        """
        if name in self:
            entry = self[name]
            return entry[self._kind](**entry["init_params"])
        if default is None:
            raise KeyError(f"{name!r} is not in the registry. Registered: {', '.join(self)}")
        return default

    def of_user(self, name: str) -> bool:
        """Return whether the user, and not fabric, has registered the class of this name."""
        return name in self and self[name][self._kind] is not self._builtins.get(name)

    def remove(self, name: str) -> None:
        """Remove a class."""
        del self[name]

    def __str__(self) -> str:
        return f"Registered: {', '.join(self)}"
