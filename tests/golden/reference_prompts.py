"""The prompts of the golden reference: prose, code and other languages, cut to lengths around block boundaries."""

from typing import Final

from model.tokenizer import Tokenizer

TEXTS: Final = {
    "mill": (
        "The mill stood where the river bends twice before it meets the sea. Every spring the miller's daughter walked "
        "down to the weir with a lantern and a ledger, and wrote how high the water stood, how many sacks had been "
        "ground, and who had paid. In the winter of 1887 the ice came early and the wheel froze fast, so that the "
        "whole village baked with barley for eleven weeks. Nobody starved, but nobody forgot it either. When the thaw "
        "came, they cut a second channel through the meadow, lined it with oak, and hung a smaller wheel there that "
        "turned even in a dry August. The miller grumbled about the cost until the day the big axle broke. After that "
        "he told "
        "every visitor that the second wheel had been his own idea, and his daughter, who had drawn the plans, let him "
        "say so and kept the drawings in the ledger between March and April. Years later an engineer from the city "
        "came to measure the fall of the water. He filled three pages with figures, drank four cups of tea, and said "
        "that the small wheel gave more power for each litre than anything he had seen on that coast. He asked who had "
        "designed it. The old man opened his mouth, looked across the table, and for once said nothing at all. The "
        "daughter brought the ledger. They talked until the lamp burned low about the shape of the buckets, the angle "
        "at which the water should strike, and why the last tenth of the fall is the one that everybody wastes. In the "
        "morning the engineer offered her a position. She asked how many rivers there were in the city, and when she "
        "heard that there was only one, and that it was covered over with stone, she laughed and went to open the gate."
    ),
    "science": (
        "Photosynthesis is the process by which green plants turn light into chemical energy. In the first stage, "
        "chlorophyll absorbs photons and uses their energy to split water molecules, which releases oxygen. In the "
        "second stage, called the Calvin cycle, the plant uses carbon dioxide from the air to build sugars. About half "
        "of the oxygen in the atmosphere comes from plankton in the ocean. The overall reaction can be written as "
        "6 CO2 + 6 H2O -> C6H12O6 + 6 O2. The rate depends on light, temperature and the concentration of carbon "
        "dioxide; beyond a certain point more light no longer helps, because the enzymes of the second stage become "
        "the bottleneck. Plants of dry regions have found ways around this: some open their pores only at night, store "
        "the carbon dioxide as an acid, and use it during the day while the pores stay closed. Others concentrate it "
        "in a ring of inner cells. Maize and sugar cane belong to the second group, which is one reason why they grow "
        "so fast in full sun. Measured over a year, a field of maize stores roughly one percent of the light that "
        "falls on it; the best leaf in a laboratory reaches about five."
    ),
    "code": (
        "import heapq\nfrom dataclasses import dataclass, field\n\n\n@dataclass(order=True)\nclass Task:\n"
        "    priority: int\n    name: str = field(compare=False)\n\n\nclass Queue:\n"
        '    """A queue that gives out the most urgent task first."""\n\n    def __init__(self) -> None:\n'
        "        self._heap: list[Task] = []\n\n    def push(self, priority: int, name: str) -> None:\n"
        "        heapq.heappush(self._heap, Task(priority, name))\n\n    def pop(self) -> str:\n"
        '        if not self._heap:\n            raise IndexError("pop from an empty queue")\n'
        "        return heapq.heappop(self._heap).name\n\n    def __len__(self) -> int:\n"
        "        return len(self._heap)\n\n\ndef main() -> None:\n    queue = Queue()\n"
        '    for number, name in enumerate(["write", "test", "ship"]):\n        queue.push(10 - number, name)\n'
        "    while len(queue) > 0:\n        print(queue.pop())\n\n\n"
        "SELECT name, count(*) AS n FROM jobs WHERE state = 'done' AND finished_at > '2024-01-31' GROUP BY name\n"
        "ORDER BY n DESC LIMIT 10;\n\n#include <stdio.h>\nint main(void) { for (int i = 0; i < 100; i++) "
        'printf("%d\\n", i * i); return 0; }\n\nfunction fibonacci(n) {\n  return n < 2 ? n : '
        "fibonacci(n - 1) + fibonacci(n - 2);\n}\n"
    ),
    "languages": (
        "Der Fluss fließt langsam durch das Tal, und am Ufer stehen alte Weiden. Les enfants jouent près de l'eau "
        "pendant que leurs parents préparent le déjeuner à l'ombre. Por la tarde llegan los músicos con guitarras y "
        "un acordeón, y la plaza se llena de gente. Вечером над рекой поднимается туман, и всё становится тихим. "
        "川のそばに小さな村があります。春になると桜が咲きます。河边有一座小村庄，村里的人都认识彼此。"
        "한국의 봄은 짧지만 아름답습니다. في الصباح يذهب الأطفال إلى المدرسة مشياً على الأقدام. "
        "Ο ποταμός κυλά αργά προς τη θάλασσα. Řeka teče pomalu údolím. नदी धीरे धीरे बहती है। 🌊🚣‍♀️ 12,345.67 € ½ ≈ 0.5"
    ),
    "list": (
        "Shopping list for 24 people:\n- 3 kg of potatoes\n- 2 dozen eggs\n- 1.5 litres of milk\n- 750 g of butter\n"
        "- salt, pepper, nutmeg\n\nSteps:\n1. Boil the potatoes for 20 minutes.\n2. Melt the butter at 60 °C.\n"
        "3. Beat the eggs; add the milk.\n4. Bake at 180 °C for 45 minutes, then rest for 10.\n\n| item | price | n |\n"
        "|---|---|---|\n| potatoes | 1.29 | 3 |\n| eggs | 3.49 | 2 |\n| milk | 1.05 | 2 |\n\nTotal: "
    ),
}

# (text, number of tokens): what is left of a text's ids after its first ones are skipped, cut to that length.
CUTS: Final = [
    ("mill", 0, 5),
    ("science", 0, 8),
    ("code", 0, 15),
    ("languages", 0, 16),
    ("mill", 40, 17),
    ("list", 0, 24),
    ("science", 30, 31),
    ("code", 50, 32),
    ("mill", 7, 33),
    ("languages", 60, 48),
    ("list", 20, 63),
    ("science", 0, 64),
    ("mill", 100, 65),
    ("code", 0, 96),
    ("science", 10, 127),
    ("mill", 0, 128),
    ("languages", 0, 129),
    ("code", 20, 200),
    ("science", 0, 240),
    ("mill", 50, 256),
    ("code", 0, 300),
    ("mill+science", 30, 384),
    ("mill+code", 10, 500),
    ("mill+science", 0, 600),
]

CHATS: Final = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the number 2024."}],
    [{"role": "system", "content": "You answer in German."}, {"role": "user", "content": "Wie spät ist es?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name, and what is 17 + 25?"},
    ],
    [{"role": "user", "content": "Explain this program:\n\n" + TEXTS["code"]}],
    [{"role": "user", "content": "Summarise in one sentence: " + TEXTS["science"]}],
    [{"role": "user", "content": "Translate into English: " + TEXTS["languages"]}],
    [{"role": "system", "content": ""}, {"role": "user", "content": TEXTS["list"]}],
]


def reference_prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The ids of all 32 prompts, by name, shortest first."""
    prompts = {}
    for name, start, num_tokens in CUTS:
        text = " ".join(TEXTS[part] for part in name.split("+"))
        prompts[f"{name}-{start}-{num_tokens}"] = tokenizer.encode(text)[start : start + num_tokens]
    for index, messages in enumerate(CHATS):
        prompts[f"chat-{index}"] = tokenizer.encode_chat(messages)
    return dict(sorted(prompts.items(), key=lambda item: len(item[1])))
