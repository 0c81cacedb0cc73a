"""Small tables of what everybody knows."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.demo_model.dialogues.words import listing


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("-") for pair in listing(text))


CAPITALS: Mapping[str, str] = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Ireland": "Dublin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Belgium": "Brussels",
    "the Czech Republic": "Prague",
    "Romania": "Bucharest",
    "Bulgaria": "Sofia",
    "Thailand": "Bangkok",
    "South Korea": "Seoul",
    "Canada": "Ottawa",
    "the United Kingdom": "London",
    "the United States": "Washington",
}
OPPOSITES: Mapping[str, str] = _pairs(
    """
hot-cold big-small tall-short fast-slow old-young rich-poor dark-light hard-soft wet-dry
full-empty early-late open-closed happy-sad strong-weak high-low long-short good-bad left-right
up-down day-night near-far loud-quiet clean-dirty heavy-light thick-thin wide-narrow true-false
first-last always-never black-white hungry-full new-old begin-end love-hate win-lose north-south
east-west inside-outside
"""
)
PLURALS: Mapping[str, str] = _pairs(
    """
cat-cats dog-dogs box-boxes bus-buses city-cities baby-babies lady-ladies child-children man-men
woman-women foot-feet tooth-teeth mouse-mice goose-geese leaf-leaves knife-knives wolf-wolves
sheep-sheep fish-fish house-houses tree-trees book-books church-churches dish-dishes
berry-berries key-keys toy-toys potato-potatoes tomato-tomatoes shelf-shelves life-lives
wife-wives ox-oxen
"""
)
THING_COLORS: Mapping[str, str] = {
    "the sky on a clear day": "Blue",
    "grass": "Green",
    "snow": "White",
    "coal": "Black",
    "a ripe banana": "Yellow",
    "blood": "Red",
    "a ripe tomato": "Red",
    "a lemon": "Yellow",
    "chocolate": "Brown",
    "milk": "White",
    "an orange": "Orange",
    "a raven": "Black",
}
COUNTS: Mapping[str, str] = {
    "How many days are in a week?": "Seven.",
    "How many months are in a year?": "Twelve.",
    "How many hours are in a day?": "24.",
    "How many minutes are in an hour?": "60.",
    "How many seconds are in a minute?": "60.",
    "How many legs does a spider have?": "Eight.",
    "How many legs does a dog have?": "Four.",
    "How many wheels does a bicycle have?": "Two.",
    "How many sides does a triangle have?": "Three.",
    "How many sides does a square have?": "Four.",
    "How many letters are in the alphabet?": "26.",
    "How many fingers are on one hand?": "Five.",
    "Which planet do we live on?": "The Earth.",
    "What does a bee make?": "Honey.",
    "What do cows give?": "Milk.",
    "Which season comes after winter?": "Spring.",
    "Which season comes after summer?": "Autumn.",
    "What is frozen water called?": "Ice.",
    "Where does the sun rise?": "In the east.",
    "What is the opposite direction of west?": "East.",
}
