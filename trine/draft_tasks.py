"""Prompts on which `trine check --drafter` tries a drafter: short ones, of kinds that are drafted differently well."""

from __future__ import annotations

_PASSAGE = """\
The ferry to Lantern Bay leaves from pier four at 7:15 every morning except Sunday. In March the company replaced the \
old boat with one that runs on batteries and carries 180 people. Bicycles travel free, but dogs need a ticket of their \
own. Since the change, 2,300 more passengers have come each month, and the cafe on the pier has hired two people."""

_MINUTES = """\
The committee met on Tuesday. Nora reported that the greenhouse roof leaks in two places and that repairs will cost \
640 euros. Anton offered to ask the glass works for an old pane. It was agreed that the tomatoes stay under the north \
side until May, and that visitors use the back door. The next meeting is on the first of April."""

_NOTICE = """\
From Monday the water in Mill Street will be turned off between nine and noon while the pipes are renewed. Please fill \
a bucket the evening before. The work takes three days if it does not rain. Whoever needs water for medical reasons \
may call the works office, which will bring bottles to the door."""

_TOTAL = """\
def total(prices, discount):
    result = 0
    for price in prices:
        result = result + price
    return result - discount"""

_LONGEST = """\
def longest(words):
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best"""

_STACK = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()"""

TASKS: dict[str, tuple[str, ...]] = {
    "open chat": (
        "Why does bread smell so good when it is baking?",
        "My neighbour plays the trumpet late at night. How should I talk to him about it?",
        "What is the difference between a comet and an asteroid?",
    ),
    "summaries": (
        f"Summarize this text in two sentences, in its own words.\n\n{_PASSAGE}",
        f"What was decided? Quote the sentences that say so.\n\n{_MINUTES}",
        f"Summarize this notice for the people who live there.\n\n{_NOTICE}",
    ),
    "code edits": (
        f"Rename the variable result to amount. Reply with the whole function.\n\n```python\n{_TOTAL}\n```",
        f"Add a docstring to this function. Reply with the whole function.\n\n```python\n{_LONGEST}\n```",
        f"Add a method size to this class. Reply with the whole class.\n\n```python\n{_STACK}\n```",
    ),
    "lists": (
        "List ten things to pack for three days in the mountains.",
        "Write a shopping list for a vegetable soup for six people.",
        "Name eight games that children can play in the rain, one per line.",
    ),
}
