"""Raised and lowered letters, and signs of old fonts, as plain text that says the same."""

import re

_UP = str.maketrans("0123456789+-−=()abcdefghijklmnoprstuvwxyzT", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᵀ")
_DOWN = str.maketrans("0123456789+-−=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_ENDS = {"st", "nd", "rd", "th", "er", "re", "ère", "e", "ème", "eme", "ter", "te", "o", "a", "os", "as"}  # of ordinals
_UNITS = {"m", "km", "dm", "cm", "mm", "µm", "μm", "um", "nm", "ft", "in", "mi", "yd", "ha", "s", "sec", "h"}
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "log", "ln", "exp", "det"}
# The fonts Symbol (from U+0020 on, then from U+00A0 on) and Wingdings have signs in the places of letters.
_SYMBOL = " !∀#∃%&∋()∗+,−./0123456789:;<=>?≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼"
_SYMBOL_HIGH = "€ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓◊〈®©™∑⎛⎜⎝⎡⎢⎣⎧⎨⎩⎪\ufffd〉∫⌠⎮⌡⎞⎟⎠⎤⎥⎦⎫⎬⎭"
_WINGDINGS = {0x4A: "☺", 0x4C: "☹", 0x6C: "●", 0x6E: "■", 0x6F: "□", 0x71: "❑", 0x72: "❒", 0x75: "◆", 0x76: "❖"}
_WINGDINGS |= {0x9F: "•", 0xA7: "▪", 0xA8: "◻", 0xD8: "➢", 0xDF: "←", 0xE0: "→", 0xE1: "↑", 0xE2: "↓", 0xE8: "➔"}
_WINGDINGS |= {0xF0: "⇨", 0xFB: "✗", 0xFC: "✓", 0xFD: "☒", 0xFE: "☑"}


def raised(text: str, before: str, is_note: bool = False) -> str:
    """A superscript. before: the text that it follows. is_note: it leads to a note. Marks of notes stand in brackets;
    exponents become Unicode's superscripts, or stand behind ^.
    """
    bare = text.strip()
    if not bare or re.fullmatch(r"[\[(].*[\])]|[®©™℠°′″*†‡§¶]+", bare):
        return text if not is_note or bare[:1] in ("", "[", "(") else f"[{bare}]"
    word = re.search(r"[^\W\d_]*$", before)
    follows, letters = before[-1:], word[0] if word else ""
    if is_note or (re.fullmatch(r"[\d, –-]+", bare) and not _is_base(follows, letters)):
        return f"[{bare}]"
    if bare in ("TM", "tm", "SM", "sm"):
        return {"t": "™", "s": "℠"}[bare[0].lower()]
    if bare.isalpha():
        if follows.isdigit() and bare in _ENDS:
            return {"o": "º", "a": "ª"}.get(bare, bare)
        if len(letters) > 1 or letters.isupper() or (len(bare) > 2 and not follows.isdigit()):
            return bare  # of an abbreviation, as M. le or Mlle
    up = bare.translate(_UP)
    if all(new != old for new, old in zip(up, bare, strict=True)):
        return up
    return f"^{bare}" if len(bare) == 1 else f"^({bare})"


def _is_base(follows: str, letters: str) -> bool:
    """Whether a raised number is an exponent: of a number, a bracket, a variable, a unit or a function."""
    if not letters:
        return follows.isdigit() or follows in (")", "]", "|", "∞", "π")
    return len(letters) == 1 or letters in _UNITS or letters in _FUNCTIONS


def lowered(text: str) -> str:
    """A subscript: Unicode's, or behind _."""
    bare = text.strip()
    if not bare:
        return text
    down = bare.translate(_DOWN)
    if all(new != old for new, old in zip(down, bare, strict=True)) and (not bare.isalpha() or len(bare) == 1):
        return down
    return f"_{bare}" if re.fullmatch(r"\w+", bare) else f"_({bare})"


def sign(font: str, code: int) -> str:
    """The sign of a font of Word; U+FFFD where it is not known. code: the character, perhaps in the private area."""
    is_private, font = code >= 0xF000, font.lower()
    code -= 0xF000 if is_private else 0
    if font == "symbol":
        table, at = (_SYMBOL, code - 0x20) if code < 0xA0 else (_SYMBOL_HIGH, code - 0xA0)
        return table[at] if 0 <= at < len(table) else "\ufffd"
    if font == "wingdings":
        return _WINGDINGS.get(code, "\ufffd")
    return "\ufffd" if is_private or code < 0x20 else chr(code)
