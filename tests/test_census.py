"""What the census counts, and what it calls new."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import census

ONE = '''"""A module that was told a lot."""

import os

# a comment
class Asked:
    """Said twice,
    over two lines.
    """

    def read(self):
        """Nothing."""
        told = "asked, but in a string"

        return told


def _private():
    return os
'''


def test_each_line_is_of_one_kind():
    assert census.kinds_of_lines(ONE) == {"docstring": 5, "import": 1, "comment": 1, "code": 6, "blank": 6}


def test_a_name_occurs_twice_where_two_files_define_it_and_it_is_a_class_or_public():
    two = "class Asked: ...\ndef _private(): ...\ndef read(): ..."
    assert census.defined_twice({"a.py": ONE, "b.py": two}) == {"Asked": ["a.py", "b.py"]}


def test_words_are_those_of_names_docstrings_and_comments_and_of_no_other_string():
    assert census.private_words({"a.py": ONE}) == {"told": 3, "asked": 1, "said": 1}


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ("twice Asked", None),
        ("twice Other", "Other is defined in more than one file"),
        ("word told 2", None),
        ("word told 4", "“told” occurs 4 times, 3 are known"),
        ("word seat 1", "“seat” occurs 1 times, 0 are known"),
    ],
)
def test_what_is_new_is_named_with_what_the_field_says(found, complaint):
    complaints = list(census.new([found], ["twice Asked", "word told 3"]))
    assert [line[: len(complaint or "")] for line in complaints] == ([complaint] if complaint else [])
