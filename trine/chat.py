"""A conversation as it stands, and what its commands do to it. Pure: neither a terminal nor a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from trine.completion import Completion

COMMANDS = {
    "/new": "begin again; the system message stays",
    "/system TEXT": "a system message, from now on; none without TEXT",
    "/undo": "take back the last question and its answer",
    "/stats": "what the last answer took",
    "/help": "these commands",
    "/quit": "leave, as Ctrl-D does",
}


@dataclass(slots=True)
class Conversation:
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    """Questions and answers, in turn."""
    last: Completion | None = None

    def asked(self, text: str) -> list[dict[str, str]]:
        """The messages to send for the question `text`; it is not part of the conversation until it is answered."""
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, *self.turns, {"role": "user", "content": text}]

    def answered(self, question: str, answer: str, done: Completion | None) -> None:
        """`done` is None for an answer that was cut off; what there is of it counts."""
        self.last = done
        if answer:
            self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str | None:
        """Carry out what begins with a slash. Returns what to say; None: leave."""
        name, _, rest = line.partition(" ")
        if name == "/new":
            self.turns.clear()
            return "a new conversation"
        if name == "/system":
            self.system = rest.strip()
            return "the system message is set" if self.system else "no system message"
        if name == "/undo":
            del self.turns[-2:]
            return f"{len(self.turns) // 2} questions are left"
        if name == "/stats":
            return stats(self.last) if self.last else "no complete answer yet"
        if name == "/help":
            return "\n".join(f"{command:<14}{what}" for command, what in COMMANDS.items())
        if name in ("/quit", "/exit"):
            return None
        return f"no command {name}; /help lists them"


def stats(done: Completion) -> str:
    """In one line: times, tokens, cache, drafts, and who did it."""
    use, times = done.usage, done.timings
    rate = f", {1e3 / times.tpot_ms:.1f} tokens/s" if times.tpot_ms else ""
    drafts = f"; {use.accepted_tokens} of {use.drafted_tokens} drafts accepted" if use.drafted_tokens else ""
    by = " ".join([*done.served_by.prefill, done.served_by.decode, *done.served_by.drafter])
    return (
        f"first token after {times.ttft_ms:.0f} ms{rate}; {use.completion_tokens} tokens, "
        f"{use.cached_tokens} of {use.prompt_tokens} prompt tokens cached{drafts}; {by}"
    )
