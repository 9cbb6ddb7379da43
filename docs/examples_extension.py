"""For mkdocstrings: a docstring's `Example:` is code to show, as `Examples:` is."""

from typing import Any

import griffe


class ExampleIsExamples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
