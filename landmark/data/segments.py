"""Which stretches of a stream an evaluation reads, and which of its predictions count."""

from dataclasses import dataclass

from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of the raw stream are fed; the last `counted` predictions count.

    The prediction made at position p is of token p + 1, so the last target is token start + length.
    """

    start: int
    length: int
    counted: int

    @property
    def targets(self) -> tuple[int, int]:
        """Range [first, stop) of the tokens whose predictions count."""
        stop = self.start + self.length + 1
        return stop - self.counted, stop


def segments(stream_length: int, length: int, tokens: int | None = None, span: int = 4096) -> list[Segment]:
    """Cut a stream into segments of `length` tokens, each fed with empty memory.

    tokens None: the paper's protocol, the whole stream cut into segments, the last one dropped, every
    prediction counted. Else a budget: floor(tokens / span) (at least 1) evenly spaced stretches of `span`
    predictions, which do not overlap and do not depend on `length`: every length is measured on the same
    text. A stretch that `length` does not divide ends in a segment moved back, of which only the new
    predictions count.

    Raises UserError: length below 1; evaluation length or span longer than the split; length above span.
    """
    if length < 1:
        raise UserError(f"eval.length={length}: an evaluation segment needs at least 1 token")
    if length + 1 > stream_length:
        raise UserError(
            f"eval.length={length} is longer than the split, which has {stream_length} tokens "
            "(one more than the length is needed): lower eval.length or choose another eval.split"
        )
    predictions = stream_length - 1
    if tokens is None:
        return [Segment(number * length, length, length) for number in range(predictions // length)]
    if tokens < 1 or span < 1:
        raise UserError(f"eval.tokens={tokens} and eval.span={span} must be at least 1")
    if length > span:
        raise UserError(f"eval.length={length} is longer than eval.span={span}: raise eval.span to at least {length}")
    if span > predictions:
        raise UserError(
            f"eval.span={span} is longer than the split, which has {stream_length} tokens: lower eval.span "
            "or evaluate the whole split with eval.tokens=null"
        )
    count = min(max(1, tokens // span), predictions // span)
    starts = [number * predictions // count for number in range(count)]
    return [segment for start in starts for segment in _cut(start, span, length)]


def _cut(start: int, span: int, length: int) -> list[Segment]:
    whole, rest = divmod(span, length)
    cut = [Segment(start + number * length, length, length) for number in range(whole)]
    if rest:
        cut.append(Segment(start + span - length, length, rest))
    return cut
