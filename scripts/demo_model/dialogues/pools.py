"""Names, places and things that dialogues are made of."""

from __future__ import annotations

import random

from scripts.demo_model.dialogues.words import listing

GIVEN_NAMES: tuple[str, ...] = listing(
    """
Ada Adam Agnes Alan Albert Alice Alma Amir Amy Andre Anna Anton Arthur Astrid Ben Bela Bruno Carl
Carla Carmen Cecil Clara Claire Cora Daisy Dana Daniel David Diana Dora Edgar Edith Elena Eli Ella
Elsa Emil Emma Eric Erik Esther Eva Felix Finn Flora Frank Frida Gina Grace Greta Hana Hanna Hans
Harry Hassan Heidi Helen Henry Hugo Ida Igor Ines Ingrid Irene Iris Ivan Jack Jacob James Jan Jane
Jasper Joan John Jonas Jose Judith Julia Karen Karim Karl Kate Kenji Kofi Lara Laura Lena Leo Leon
Lily Linda Lisa Lucas Lucy Luis Lydia Maja Marco Maria Mark Martha Martin Mary Max Maya Mei Mia Milo
Mina Mira Mona Nadia Nina Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Paul Paula Pavel Pedro
Peter Petra Philip Priya Rafael Ralph Ravi Rita Robert Rosa Ruth Samir Sam Sara Selma Simon Sofia
Sonja Stella Sven Tara Theo Thomas Tim Tina Tom Ulla Ursula Vera Victor Viola Walter Wanda Will Yara
Yuki Yusuf Zara Zoe
"""
)
SURNAMES: tuple[str, ...] = listing(
    """
Abbott Adler Bauer Becker Bell Berg Black Bloom Bond Braun Brook Brown Burns Carter Chen Clark Cole
Cook Costa Cross Dahl Davis Diaz Dietrich Ellis Evans Farmer Fischer Fisher Fox Frost Garcia Gray
Green Haas Hall Hansen Hill Holm Hunt Ito Ivanov Jensen Jones Kaya Keller Khan King Klein Koch Kim
Lang Larsen Lee Lehmann Lopez Lund Marsh Martin Mason Meyer Miller Moore Moreau Mori Moss Murphy
Nair Neumann Nolan Novak Okoro Olsen Palmer Park Patel Perez Petrov Pohl Price Quinn Ramos Reed
Richter Rivera Roth Rossi Sato Schmidt Scott Shaw Silva Singh Smith Stone Swan Tanaka Taylor Torres
Turner Vogel Wagner Walsh Ward Weber West White Winter Wolf Wood Wright Yilmaz Young Zimmer
"""
)
CITIES: tuple[str, ...] = listing(
    """
Accra Amman Amsterdam Ankara Athens Baghdad Bangkok Barcelona Basel Beijing Belgrade Bergen Berlin
Bern Bogota Bonn Boston Bremen Brussels Bucharest Budapest Cairo Calgary Chicago Cologne Copenhagen
Cork Dakar Dallas Delhi Denver Dresden Dublin Edinburgh Florence Geneva Genoa Glasgow Graz Hamburg
Hanoi Havana Helsinki Houston Istanbul Jakarta Kabul Kiel Kyoto Lagos Lahore Leeds Leipzig Lima Linz
Lisbon Liverpool London Lyon Madrid Malaga Manila Marseille Melbourne Miami Milan Montreal Moscow
Mumbai Munich Nairobi Naples Nice Nuremberg Oslo Osaka Ottawa Oxford Paris Perth Porto Prague Quito
Riga Rome Rotterdam Salzburg Santiago Seattle Seoul Seville Shanghai Sofia Stockholm Stuttgart
Sydney Taipei Tallinn Tampere Tokyo Toronto Trieste Tunis Turin Utrecht Valencia Venice Vienna
Vilnius Warsaw York Zagreb Zurich
"""
)
JOBS: tuple[str, ...] = listing(
    """
actor architect artist baker barber butcher captain carpenter chemist clerk coach cook dancer
dentist designer doctor driver editor engineer farmer firefighter fisher gardener guide hunter
janitor jeweler judge lawyer librarian mason mechanic miner musician nurse painter pharmacist
photographer pilot plumber poet potter printer sailor sculptor singer smith soldier surgeon tailor
teacher translator vet waiter weaver writer
"""
)
COLORS: tuple[str, ...] = listing(
    "black blue brown golden gray green orange pink purple red silver white yellow"
)
THINGS: tuple[str, ...] = listing(
    """
apples balls beads books bottles boxes buttons cards carrots chairs coins cookies cups eggs flowers
grapes hats keys lamps lemons letters marbles melons nails nuts oranges pears pencils pens plates
plums postcards ribbons roses shells shirts socks spoons stamps stars stickers stones tickets
tomatoes toys tulips
"""
)
ARTICLES: tuple[str, ...] = listing(
    """
backpack basket bicycle blanket camera candle carpet clock coat cup desk drum fan flute guitar
hammer helmet jacket kettle kite knife ladder lamp lantern mirror mug notebook oven pan pen piano
pillow radio rope ruler saw scarf sofa stove suitcase sweater table telescope tent toaster towel
umbrella vase violin wallet watch
"""
)
BRANDS: tuple[str, ...] = listing(
    """
Alto Arvo Belmo Brisk Corvi Delta Elmo Fenix Gala Halo Indigo Juno Kappa Lumo Mirado Nordo Orbit
Polar Quadra Rova Solis Tempo Umbra Vesta Wendo Xeno Yara Zenta
"""
)
COUNTRIES: tuple[str, ...] = listing(
    """
Argentina Austria Belgium Brazil Canada Chile China Cuba Denmark Egypt Finland France Germany Ghana
Greece Hungary Iceland India Ireland Israel Italy Japan Kenya Mexico Morocco Norway Peru Poland
Portugal Romania Russia Spain Sweden Thailand Turkey Ukraine Vietnam
"""
)
LANGUAGES: tuple[str, ...] = listing(
    """
Arabic Chinese Czech Danish Dutch English Finnish French German Greek Hindi Italian Japanese Korean
Latin Norwegian Polish Portuguese Russian Spanish Swedish Turkish
"""
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
PETS = ("canary", "cat", "dog", "goat", "hamster", "horse", "parrot", "pony", "rabbit", "turtle")
_HEADS = listing("b br c d dr f fl g gr h j k kl l m n p pl r s st t tr v w z")
_MIDDLES = listing("a e i o u ai ea ou")
_TAILS = listing("l m n r s t rd nd ck x lm")


def syllables(rng: random.Random, count: int = 2) -> str:
    """A word that means nothing: a name that nobody could know by heart."""
    parts = [rng.choice(_HEADS) + rng.choice(_MIDDLES) for _ in range(count)]
    return "".join(parts) + (rng.choice(_TAILS) if rng.random() < 0.6 else "")


def full_name(rng: random.Random) -> str:
    """A given name, most often with a surname; some are made up."""
    given = rng.choice(GIVEN_NAMES) if rng.random() < 0.85 else syllables(rng).capitalize()
    family = rng.choice(SURNAMES) if rng.random() < 0.85 else syllables(rng).capitalize()
    return f"{given} {family}" if rng.random() < 0.6 else given


def city(rng: random.Random) -> str:
    """A city; some are made up."""
    return rng.choice(CITIES) if rng.random() < 0.85 else syllables(rng, 2).capitalize()
