"""A griffe extension: a docstring's line that begins with a name in backticks and a colon begins a paragraph on the site.

    `scaler`: its scale multiplies the gradients.

Docstrings are read from the sources, so the site is built without torch.
"""

import re

import griffe

_ENTRY = re.compile(r"\n(?=`[\w.]+(?:\[\w\])?`(?:, `[\w.]+(?:\[\w\])?`)*: )")


class Paragraphs(griffe.Extension):
    """Insert an empty line before each such line, outside of indented sections."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = _ENTRY.sub("\n\n", obj.docstring.value)
