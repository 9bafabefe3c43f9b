"""What the texts of RULER's tasks are made of: noise, keys, and the text of a split as essays."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from landmark.data.tokenizers import Tokenizer
from landmark.utils.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_WORD = re.compile(r"[a-z]{3,12}")
_AT_FIRST = 1 << 14  # tokens of an essay that are decoded first


@dataclass(frozen=True)
class Material:
    """What texts are made of. keys: of needles. words: of lists of words. essay: the words of an essay, in order."""

    keys: Sequence[str]
    words: Sequence[str]
    essay: Sequence[str]


class Essays:
    """Words of a stream, decoded as far as they are needed; after its end it begins again."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer):
        """tokens: (N,) ids of the stream. Raises UserError for a stream without words."""
        self._tokens, self._tokenizer = tokens, tokenizer
        self._words: list[str] = []
        self._decoded = 0
        if not self.words(0, 1)[0]:
            raise UserError("eval.task, data.tasks: the split has no words that essays could be made of")

    def words(self, first: int, count: int) -> list[str]:
        """`count` words from number `first` on."""
        while len(self._words) < first + count and self._decoded < len(self._tokens):
            self._decoded = min(max(_AT_FIRST, 4 * self._decoded), len(self._tokens))
            is_whole = self._decoded == len(self._tokens)
            words = self._tokenizer.decode(self._tokens[: self._decoded]).split()
            self._words = words if is_whole else words[:-1]  # whose last one may be cut
        if not self._words:
            return [""] * count
        first %= len(self._words)
        found = self._words[first : first + count]
        while len(found) < count:
            found += self._words[: count - len(found)]
        return found

    @cached_property
    def vocabulary(self) -> list[str]:
        """Different words of 3 to 12 small letters in the first million tokens, in their order of the alphabet."""
        text = self._tokenizer.decode(self._tokens[: 1 << 20])
        return sorted({word for word in text.split() if _WORD.fullmatch(word)})


# Words of the keys `adjective-noun`: 151 adjectives and 280 nouns, so 42,280 keys. RULER's own come from the package
# wonderwords; these are others, so that nothing has to be installed.
ADJECTIVES = """
able acid aged airy alert ample amber ancient angry aware awful awkward bare basic bitter blank bleak blind blue blunt
bold bossy brave brief bright brisk broad broken brown bumpy busy calm careful cheap clean clear clever cloudy clumsy
coarse cold cool cozy crisp cruel curly damp dark dear deep dizzy dry dull eager early easy elegant empty equal exact
faint fair false famous fancy fast fierce fine firm flat fluffy fond foolish fresh frosty full funny fuzzy gentle
giant glad gloomy golden good grand grave great greedy green grey grim handy happy hard harsh hasty heavy hollow
honest hot huge humble hungry icy ideal idle jolly juicy keen kind large late lazy lean light little lively lonely
long loose loud loyal lucky mad major mellow mild minor misty modern modest muddy narrow neat new nice noble noisy odd
old open orange pale plain polite poor proud pure quick quiet rare
"""
NOUNS = """
acorn actor alley anchor angle ankle apple apron arch arrow artist atlas attic aunt autumn badge baker ball banana
band bank barn barrel basket bath beach bead beam bean bear bed bee bell belt bench berry bird blanket boat bone book
boot bottle bowl box brain branch bread brick bridge broom brush bucket bud bull bus butter button cabin cable cake
camel camp candle canoe canvas cap captain card carpet carrot cart castle cat cave cellar chain chair chalk cheese
cherry chest chicken child chimney church circle city clay clock cloth cloud clown coach coal coast coat coin collar
comb cook copper coral cork corn cottage cotton couch cousin cow crab cradle crane crayon cream creek crew crow crown
cup curtain dairy daisy dance deer desert desk diamond dinner dish ditch doctor dog doll donkey door dove dragon
drawer dress drum duck eagle ear earth egg elbow elephant engine eye face family farm farmer feast feather fence field
finger fire fish flag flame flock floor flower flute fog forest fork fox frame friend frog fruit garden garlic gate
ghost giraffe girl glass glove goat gold goose grain grape grass guitar hall hammer hand harbor harp hat hawk heart
hedge hen hill hive home honey hook horn horse hotel house ice ink iron island jacket jar jelly jewel judge juice
kettle key king kitchen kite kitten knee knife knot ladder lake lamb lamp lawn leaf leg lemon letter library lily lion
lizard lock log lunch magnet maid map maple market meadow medal milk mill mirror monk monkey moon moth mouse mule
museum nail neck needle nest net night nurse nut oak ocean onion orchard oven owl ox paint palace paper park
"""
KEYS = sorted(f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split())
