"""Common words, of three letters and more, in lower case."""

from __future__ import annotations


def listing(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NOUNS: tuple[str, ...] = listing(
    """
acorn actor air alarm album anchor angel animal ankle answer ant apple apron arch arm army arrow
art ash atlas aunt autumn axe baby back bag baker ball balloon banana band bank barn basket bath
beach bean bear beard bed bee bell belt bench berry bike bird blanket block board boat bone book
boot border bottle bowl box boy branch brass bread brick bridge broom brother brush bucket bug
butter button cabin cable cactus cage cake camel camera camp canal candle canoe captain car card
carpet carrot castle cat cave cellar chain chair chalk cheese cherry chess child chimney church
circle circus city clay clerk cliff clock cloth cloud clown coal coast coat coffee coin comb
concert cook copper coral corn corner cotton couch cousin cow crab cradle crane cream creek crow
crowd crown cup curtain cushion dairy dance dawn day deer desert desk diamond dice dinner doctor
dog doll dolphin donkey door dragon drawer dream dress drum duck dust eagle ear earth east echo edge
eel egg elbow elephant elm engine envelope evening eye face factory falcon family fan farm farmer
father feather fence fern ferry field finger fire fish flag flame flea flood floor flour flower
flute fly foam fog food foot forest fork fort fountain fox frame friend frog fruit funnel fur
galaxy game garden garlic gate ghost giant gift giraffe girl glacier glass globe glove goat gold
goose grape grass gravel grocer guitar gull hail hair hall ham hammer hand harbor hare harp hat hawk
hay head heart hedge hen herb hero hill hinge hive home honey hood hook horn horse hotel hour house
ice idea igloo ink inn insect iron island ivory ivy jacket jade jam jar jelly jewel joke journey
judge juice jungle jury kayak kettle key king kitchen kite kitten knee knife knight knot label lace
ladder lady lake lamb lamp lantern lark lawn leaf leather lemon letter library lid light lily lime
line lion lip lizard lobster lock log lunch magnet maid mail mango map maple marble market mask mast
meadow meal meat medal melon metal milk mill miner mint mirror mist money monkey month moon morning
moss moth mother motor mountain mouse mouth mud muffin museum mushroom music nail name napkin navy
neck needle nephew nest net nickel niece night noise noon north nose note nurse nut oak oar oasis
oat ocean office oil olive onion opera orange orchard otter oven owl oyster paddle page paint palace
palm pan panda paper parade parcel parent park parrot path peach pear pearl pebble pen pencil penguin
pepper piano picnic picture pie pig pigeon pillow pilot pin pine pipe pirate planet plate plum
pocket poem poet police pond pony potato pottery powder prince pump puppet purse puzzle queen quilt
rabbit radio raft railway rain ranch raven razor reef ribbon rice ring river road robin rocket rod
roof room rooster root rope rose rubber ruby rug ruler sack saddle sail sailor salad salt sand
sandal sauce saw scarf school scissors sea seal season seed shark shed sheep shelf shell shepherd
ship shirt shoe shop shore shovel silk silver singer sister skate skirt skull sky sled sleeve slipper
smoke snail snake snow soap sock sofa soil soldier song soup south spade sparrow spice spider spoon
spring square squirrel stable stage stair stamp star station statue steam steel stem stick stone
stool storm stove straw stream street string sugar suit summer sun swan sweater sword table tail
tailor tank tape tea teacher tent theater thread throat throne thumb thunder ticket tide tiger tile
timber tin toast toe tomato tongue tool tooth torch towel tower town toy track tractor train tray
treasure tree trumpet trunk tulip tunnel turkey turnip turtle uncle uniform valley vase velvet
vessel village vine violin voice volcano wagon waist wall walnut walrus watch water wave wax weasel
web wedding week well west whale wheat wheel whip whistle wife wind window wine wing winter wire
witch wolf wood wool world worm wrist yacht yard yarn year yogurt zebra zipper zoo
"""
)
ADJECTIVES: tuple[str, ...] = listing(
    """
angry bitter black blue bold brave bright broad brown busy calm careful cheap clean clever cold
cool curious dark deep dry early empty fair famous fast flat fresh full gentle glad golden grand
gray great green happy hard heavy hollow honest hot huge hungry idle jolly kind large late lazy
light little lonely long loud lucky merry mild narrow near neat new noble odd old pale patient plain
polite poor proud pure quick quiet rare red rich ripe rough round royal sad safe sharp short shy
silent simple slow small smart smooth soft solid sour steep strange strong sudden sweet tall tame
thick thin tidy tiny tired warm weak wet white wide wild wise yellow young
"""
)
VERBS: tuple[str, ...] = listing(
    """
ask bake begin bend bite blow break bring build burn buy call carry catch choose clap climb close
come count cover cross cry cut dig draw drink drive drop eat enter fall feed feel fight find float
fold follow forget gather give grow guess hang hear help hide hold hope hunt join jump keep kick
knock know laugh lead learn leave lend lift listen look lose love make measure meet melt mend move
need open order pack pass pay pick plant play point pour pray press promise pull push put reach read
rest return ride rise roll run save say see sell send sew shake share shine shout show sing sit
sleep smell smile speak spell spend spin stand start stay steal stop study sweep swim swing take
talk taste teach tell think throw touch travel try turn visit wait wake walk wash wear weave whisper
win wish work write yawn
"""
)
WORDS: tuple[str, ...] = tuple(sorted({*NOUNS, *ADJECTIVES, *VERBS}))
"""All of them, each once."""
