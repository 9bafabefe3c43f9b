"""The segments of a stream that an evaluation reads, and the predictions in them that count."""

from dataclasses import dataclass

from landmark.utils.errors import UserError


@dataclass(frozen=True)
class Segment:
    """Tokens start … start+length−1 of the raw stream, of whose predictions the last `counted` count.

    The prediction at token p is of token p + 1, so the last target is token start + length.
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
    """Cut a stream into segments, each of which is read with an empty memory.

    Without a budget, as in the paper (Section 4.1), the whole stream is cut, the shorter rest is dropped, and every
    prediction counts. With a budget, ⌊tokens / span⌋ (at least 1) evenly spaced spans of `span` predictions are cut.
    They do not overlap and do not depend on `length`, so every length is measured on the same text. If `length` does
    not divide the span, the last segment is moved back, and only its new predictions count.

    Args:
        stream_length: tokens of the stream.
        length: tokens of a segment.
        tokens: the budget, in predictions (None: the whole stream).
        span: predictions of a span.

    Raises UserError for a length below 1 or above span, and for a length or span longer than the stream.
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
