"""Words of the keys `adjective-noun`: 151 adjectives and 280 nouns, so 42,280 keys.

RULER's own come from the package wonderwords; these are others, so that nothing has to be installed.
"""

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
