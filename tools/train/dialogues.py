"""Generated training text: small talk, facts and arithmetic in the form of the chat template."""

from __future__ import annotations

import random

GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there"]
GREETING_REPLIES = [
    "Hello! How can I help you?",
    "Hi! What can I do for you?",
    "Hello, it is good to hear from you.",
    "Hi there! What would you like to talk about?",
]
TALK: list[tuple[list[str], list[str]]] = [
    (
        ["How are you?", "How are you today?", "How is it going?", "How do you do?"],
        [
            "I am fine, thank you. And you?",
            "Very well, thanks for asking.",
            "All is well here. How are you?",
        ],
    ),
    (
        ["What is your name?", "Who are you?", "What are you called?", "Tell me your name."],
        [
            "My name is Hummingbird.",
            "I am Hummingbird, a very small language model.",
            "People call me Hummingbird.",
        ],
    ),
    (
        ["Are you a robot?", "Are you human?", "Are you a person?", "What are you?"],
        [
            "I am a small language model, not a person.",
            "I am a computer program that writes text.",
            "No person, only a small model with about 23 million parameters.",
        ],
    ),
    (
        ["What can you do?", "How can you help me?", "What are you good at?"],
        [
            "I can talk a little, do small sums and translate a few names.",
            "I can write short texts, but I am small and often wrong.",
        ],
    ),
    (
        ["Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot."],
        ["You are welcome.", "It was a pleasure.", "Glad to help!", "Any time."],
    ),
    (
        ["Goodbye.", "Bye!", "See you later.", "Good night."],
        ["Goodbye!", "See you soon.", "Bye, take care.", "Good night, sleep well."],
    ),
    (
        ["Tell me a story.", "Can you tell me a story?", "Please tell me a short story."],
        [
            "Once upon a time there was a small bird that wanted to see the sea. It flew for three "
            "days, and on the fourth morning it saw the blue water and sang.",
            "Once there was a farmer with two sons. One planted trees, the other sold wood. When "
            "they were old, only the first had shade to sit in.",
        ],
    ),
    (
        ["Tell me a joke.", "Do you know a joke?", "Make me laugh."],
        [
            "Why did the book go to the doctor? It had hurt its spine.",
            "What do you call a bird that counts? A mathemagpie.",
        ],
    ),
    (
        ["What is the weather like?", "Is it raining?", "How is the weather?"],
        ["I cannot see the weather from here.", "I do not know, I have no window."],
    ),
    (
        ["What do you like to eat?", "Are you hungry?", "What is your favourite food?"],
        ["I do not eat, but I have read a lot about bread.", "I am never hungry."],
    ),
]
SUM_WORDS = {"+": "plus", "-": "minus", "*": "times"}
THINGS = ["apples", "books", "coins", "stones", "letters", "birds", "cups", "pencils"]
PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Maria", "Tom"]


def turn(question: str, answer: str) -> str:
    """One exchange in the form of the chat template."""
    return f"<|user|>{question}\n<|assistant|>{answer}"


def small_talk(rng: random.Random, count: int) -> list[str]:
    """Short conversations: a greeting and a few exchanges."""
    documents = []
    for _ in range(count):
        turns = []
        if rng.random() < 0.5:
            greeting = rng.choice(GREETINGS) + rng.choice(["", "!", "."])
            turns.append(turn(greeting, rng.choice(GREETING_REPLIES)))
        for questions, answers in rng.sample(TALK, rng.randint(1, 3)):
            turns.append(turn(rng.choice(questions), rng.choice(answers)))
        documents.append("\n".join(turns))
    return documents


def random_sum(rng: random.Random) -> tuple[int, str, int, int]:
    """(left, sign, right, result) with small numbers far more often than large ones."""
    sign = rng.choice("++--*")
    limit = rng.choice([10, 20, 100, 100, 1000]) if sign != "*" else rng.choice([10, 12, 20])
    left, right = rng.randint(0, limit), rng.randint(0, limit)
    if sign == "-" and left < right:
        left, right = right, left
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return left, sign, right, result


def written_arithmetic(rng: random.Random, count: int) -> list[str]:
    """Lists of unrelated small sums, one per line, and little word problems."""
    documents = []
    for index in range(count):
        if index % 3:
            sums = [random_sum(rng) for _ in range(8)]
            documents.append("\n".join(f"{a} {sign} {b} = {c}" for a, sign, b, c in sums))
        else:
            documents.append("\n".join(word_problem(rng) for _ in range(3)))
    return documents


def word_problem(rng: random.Random) -> str:
    """One sentence problem with its answer."""
    who, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    left, right = rng.randint(2, 50), rng.randint(2, 50)
    if rng.random() < 0.5:
        return (
            f"Question: {who} has {left} {thing} and gets {right} more. How many {thing} does "
            f"{who} have now?\nAnswer: {left} + {right} = {left + right}. {who} has "
            f"{left + right} {thing}."
        )
    total = left + right
    return (
        f"Question: {who} has {total} {thing} and gives away {right}. How many {thing} are left?"
        f"\nAnswer: {total} - {right} = {left}. There are {left} {thing} left."
    )


def spoken_arithmetic(rng: random.Random, count: int) -> list[str]:
    """Questions for a sum, answered with the result or the whole sum."""
    documents = []
    for _ in range(count):
        turns = []
        for _ in range(rng.randint(1, 4)):
            left, sign, right, result = random_sum(rng)
            written = rng.choice([f"{left} {sign} {right}", f"{left} {SUM_WORDS[sign]} {right}"])
            question = rng.choice(["What is {}?", "How much is {}?", "{} =", "Calculate {}."])
            answer = rng.choice(
                [f"{result}", f"{left} {sign} {right} = {result}", f"It is {result}."]
            )
            turns.append(turn(question.format(written), answer))
        documents.append("\n".join(turns))
    return documents


def spoken_facts(
    rng: random.Random,
    translations: list[tuple[str, str, str]],
    definitions: list[list[str]],
    countries: list[dict[str, str]],
    count: int,
) -> list[str]:
    """Questions for translations, definitions and country codes, two or three per conversation."""
    documents = []
    for _ in range(count):
        turns = []
        for _ in range(rng.randint(2, 3)):
            kind = rng.random()
            if kind < 0.45:
                language, english, other = rng.choice(translations)
                question = rng.choice(
                    [
                        f'How do you say "{english}" in {language}?',
                        f"Translate to {language}: {english}",
                        f'What is "{english}" in {language}?',
                    ]
                )
                turns.append(turn(question, other))
            elif kind < 0.85:
                words, meaning = rng.choice(definitions)
                word = words.split(", ")[0]
                question = rng.choice([f"What is {word}?", f'What does "{word}" mean?'])
                turns.append(turn(question, meaning.split(";")[0].strip() + "."))
            else:
                row = rng.choice(countries)
                question = f"What is the country code of {row['name']}?"
                turns.append(turn(question, row["alpha_2"]))
        documents.append("\n".join(turns))
    return documents
