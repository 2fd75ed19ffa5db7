"""What the tiny model knows: plain tables, written for this project."""

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """Read `key: value; key: value` into a dict; line breaks count as spaces."""
    entries = (entry.strip() for entry in " ".join(text.split()).split(";"))
    return {key.strip(): value.strip() for key, _, value in (entry.partition(":") for entry in entries if entry)}


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """The phrases of a text, set apart by bars; line breaks count as spaces."""
    return tuple(phrase.strip() for phrase in " ".join(text.split()).split("|"))


CAPITALS = _pairs(
    """
    Afghanistan: Kabul; Albania: Tirana; Algeria: Algiers; Andorra: Andorra la Vella; Angola: Luanda;
    Antigua and Barbuda: Saint John's; Argentina: Buenos Aires; Armenia: Yerevan; Australia: Canberra;
    Austria: Vienna; Azerbaijan: Baku; the Bahamas: Nassau; Bahrain: Manama; Bangladesh: Dhaka;
    Barbados: Bridgetown; Belarus: Minsk; Belgium: Brussels; Belize: Belmopan; Benin: Porto-Novo;
    Bhutan: Thimphu; Bolivia: Sucre; Bosnia and Herzegovina: Sarajevo; Botswana: Gaborone; Brazil:
    Brasilia; Brunei: Bandar Seri Begawan; Bulgaria: Sofia; Burkina Faso: Ouagadougou; Burundi: Gitega;
    Cambodia: Phnom Penh; Cameroon: Yaounde; Canada: Ottawa; Cape Verde: Praia; the Central African
    Republic: Bangui; Chad: N'Djamena; Chile: Santiago; China: Beijing; Colombia: Bogota; the Comoros:
    Moroni; Costa Rica: San Jose; Croatia: Zagreb; Cuba: Havana; Cyprus: Nicosia; the Czech Republic:
    Prague; the Democratic Republic of the Congo: Kinshasa; Denmark: Copenhagen; Djibouti: Djibouti;
    Dominica: Roseau; the Dominican Republic: Santo Domingo; East Timor: Dili; Ecuador: Quito; Egypt:
    Cairo; El Salvador: San Salvador; Eritrea: Asmara; Estonia: Tallinn; Eswatini: Mbabane; Ethiopia:
    Addis Ababa; Fiji: Suva; Finland: Helsinki; France: Paris; Gabon: Libreville; the Gambia: Banjul;
    Georgia: Tbilisi; Germany: Berlin; Ghana: Accra; Greece: Athens; Grenada: Saint George's; Guatemala:
    Guatemala City; Guinea: Conakry; Guinea-Bissau: Bissau; Guyana: Georgetown; Haiti: Port-au-Prince;
    Honduras: Tegucigalpa; Hungary: Budapest; Iceland: Reykjavik; India: New Delhi; Indonesia: Jakarta;
    Iran: Tehran; Iraq: Baghdad; Ireland: Dublin; Italy: Rome; Ivory Coast: Yamoussoukro; Jamaica:
    Kingston; Japan: Tokyo; Jordan: Amman; Kazakhstan: Astana; Kenya: Nairobi; Kiribati: South Tarawa;
    Kuwait: Kuwait City; Kyrgyzstan: Bishkek; Laos: Vientiane; Latvia: Riga; Lebanon: Beirut; Lesotho:
    Maseru; Liberia: Monrovia; Libya: Tripoli; Liechtenstein: Vaduz; Lithuania: Vilnius; Luxembourg:
    Luxembourg; Madagascar: Antananarivo; Malawi: Lilongwe; Malaysia: Kuala Lumpur; the Maldives: Male;
    Mali: Bamako; Malta: Valletta; the Marshall Islands: Majuro; Mauritania: Nouakchott; Mauritius: Port
    Louis; Mexico: Mexico City; Micronesia: Palikir; Moldova: Chisinau; Monaco: Monaco; Mongolia:
    Ulaanbaatar; Montenegro: Podgorica; Morocco: Rabat; Mozambique: Maputo; Myanmar: Naypyidaw; Namibia:
    Windhoek; Nepal: Kathmandu; the Netherlands: Amsterdam; New Zealand: Wellington; Nicaragua: Managua;
    Niger: Niamey; Nigeria: Abuja; North Korea: Pyongyang; North Macedonia: Skopje; Norway: Oslo; Oman:
    Muscat; Pakistan: Islamabad; Palau: Ngerulmud; Panama: Panama City; Papua New Guinea: Port Moresby;
    Paraguay: Asuncion; Peru: Lima; the Philippines: Manila; Poland: Warsaw; Portugal: Lisbon; Qatar:
    Doha; the Republic of the Congo: Brazzaville; Romania: Bucharest; Russia: Moscow; Rwanda: Kigali;
    Saint Kitts and Nevis: Basseterre; Saint Lucia: Castries; Saint Vincent and the Grenadines:
    Kingstown; Samoa: Apia; San Marino: San Marino; Sao Tome and Principe: Sao Tome; Saudi Arabia:
    Riyadh; Senegal: Dakar; Serbia: Belgrade; Seychelles: Victoria; Sierra Leone: Freetown; Singapore:
    Singapore; Slovakia: Bratislava; Slovenia: Ljubljana; the Solomon Islands: Honiara; Somalia:
    Mogadishu; South Africa: Pretoria; South Korea: Seoul; South Sudan: Juba; Spain: Madrid; Sri Lanka:
    Sri Jayawardenepura Kotte; Sudan: Khartoum; Suriname: Paramaribo; Sweden: Stockholm; Switzerland:
    Bern; Syria: Damascus; Taiwan: Taipei; Tajikistan: Dushanbe; Tanzania: Dodoma; Thailand: Bangkok;
    Togo: Lome; Tonga: Nuku'alofa; Trinidad and Tobago: Port of Spain; Tunisia: Tunis; Turkey: Ankara;
    Turkmenistan: Ashgabat; Tuvalu: Funafuti; Uganda: Kampala; Ukraine: Kyiv; the United Arab Emirates:
    Abu Dhabi; the United Kingdom: London; the United States: Washington, D.C.; Uruguay: Montevideo;
    Uzbekistan: Tashkent; Vanuatu: Port Vila; Venezuela: Caracas; Vietnam: Hanoi; Yemen: Sanaa; Zambia:
    Lusaka; Zimbabwe: Harare
    """
)

# thing (with its article) -> colour
THING_COLOURS = _pairs(
    """
    the sky: blue; the sea: blue; grass: green; a leaf: green; a frog: green; a cucumber: green; a pea:
    green; a lime: green; broccoli: green; spinach: green; a cactus: green; an emerald: green; snow:
    white; milk: white; salt: white; a swan: white; rice: white; a polar bear: white; chalk: white;
    cotton: white; paper: white; flour: white; a tomato: red; blood: red; a strawberry: red; a cherry:
    red; a fire engine: red; a ruby: red; a stop sign: red; a ladybird: red; a raspberry: red; a brick:
    red; a banana: yellow; the sun: yellow; a lemon: yellow; a sunflower: yellow; butter: yellow; a
    canary: yellow; corn: yellow; mustard: yellow; a chick: yellow; an orange: orange; a carrot: orange;
    a pumpkin: orange; an apricot: orange; a tangerine: orange; coal: black; a crow: black; the night:
    black; tar: black; ink: black; a raven: black; a panther: black; chocolate: brown; coffee: brown;
    wood: brown; soil: brown; a bear: brown; a chestnut: brown; a walnut: brown; an elephant: grey; ash:
    grey; a rock: grey; a mouse: grey; a dolphin: grey; concrete: grey; a rain cloud: grey; a plum:
    purple; a grape: purple; an aubergine: purple; lavender: purple; a violet: purple; an amethyst:
    purple; a flamingo: pink; a pig: pink; bubble gum: pink; a blueberry: blue; a sapphire: blue; a
    bluebell: blue; gold: yellow; silver: grey
    """
)
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey")
MIXES = {
    ("blue", "yellow"): "green",
    ("red", "yellow"): "orange",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
    ("red", "green"): "brown",
    ("blue", "white"): "light blue",
    ("blue", "black"): "dark blue",
    ("green", "white"): "light green",
    ("green", "black"): "dark green",
    ("red", "black"): "dark red",
    ("blue", "green"): "turquoise",
}

DEFINITIONS = _pairs(
    """
    volcano: a mountain that can throw out hot rock and ash; island: land with water all around it;
    river: a long stream of water that flows to the sea; lake: a large body of water with land all
    around it; mountain: land that rises high above everything near it; desert: a dry place where little
    rain falls; forest: a large area covered with trees; valley: the low land between hills; beach: the
    sandy edge of the sea; cave: a hollow place under the ground; bridge: a road built over water or a
    gap; tower: a tall and narrow building; castle: a strong old building with thick walls; museum: a
    place where old or precious things are shown; library: a place where people read and borrow books;
    school: a place where children learn; hospital: a place where sick people are cared for; bakery: a
    shop where bread is made; market: a place where people buy and sell things; garden: a piece of land
    where plants are grown; farm: land where crops and animals are raised; kitchen: a room where food is
    cooked; bedroom: a room where people sleep; cellar: a room under a house; attic: a room just under
    the roof; window: an opening in a wall that lets in light; door: a panel that opens and closes an
    entrance; roof: the cover on top of a building; chair: a seat for one person; table: a flat top that
    stands on legs; bed: a piece of furniture to sleep on; lamp: a thing that gives light; mirror: a
    glass that shows your image; clock: a machine that shows the time; calendar: a list of the days of
    the year; map: a drawing of a place; compass: a tool that shows where north is; telescope: a tool
    for looking at things far away; microscope: a tool for looking at very small things; hammer: a tool
    for driving nails; saw: a tool with teeth for cutting wood; knife: a tool with a sharp blade; spoon:
    a tool for eating soup; fork: a tool with points for picking up food; bottle: a container with a
    narrow neck; basket: a container made of woven strips; bucket: an open container with a handle;
    candle: a stick of wax that burns to give light; umbrella: a cover that keeps the rain off you;
    coat: a warm piece of clothing worn outside; hat: a piece of clothing for the head; glove: a piece
    of clothing for the hand; shoe: a cover for the foot; ring: a small band worn on a finger; necklace:
    a chain worn around the neck; button: a small disc that fastens clothes; needle: a thin piece of
    metal used for sewing; rope: a thick and strong string; ladder: a set of steps for climbing; wheel:
    a round thing that turns so that a cart can roll; bicycle: a vehicle with two wheels and pedals;
    car: a vehicle with four wheels and an engine; train: a row of carriages that runs on rails; ship: a
    large boat that crosses the sea; boat: a small vessel that floats on water; plane: a machine with
    wings that flies; rocket: a machine that flies into space; engine: a machine that makes things move;
    robot: a machine that can do work by itself; computer: a machine that follows programs; keyboard: a
    set of keys for typing; screen: a flat surface that shows pictures; server: a computer that answers
    requests from other computers; program: a list of steps for a computer; cache: a store that keeps
    things close at hand for later; queue: a line of things that wait for their turn; token: a small
    piece of text that a model reads; prompt: the text that you give to a model; tree: a tall plant with
    a trunk and branches; flower: the colourful part of a plant; seed: the small part from which a plant
    grows; root: the part of a plant under the ground; fruit: the part of a plant that holds the seeds;
    vegetable: a plant that is eaten as food; apple: a round fruit that grows on a tree; potato: a
    vegetable that grows under the ground; onion: a round vegetable with a strong smell; cheese: a food
    made from milk; honey: a sweet food made by bees; soup: a hot liquid food; cake: a sweet food that
    is baked; pasta: a food made from flour and water; salad: a dish of mixed raw vegetables; breakfast:
    the first meal of the day; dinner: the main meal of the day; dog: an animal that is kept as a friend
    and a guard; cat: a small furry animal that hunts mice; horse: a large animal that people ride; cow:
    a farm animal that gives milk; sheep: a farm animal that gives wool; goat: a farm animal with horns
    and a beard; rabbit: a small animal with long ears; fox: a wild animal with red fur and a thick
    tail; wolf: a wild animal that looks like a large dog; lion: a large wild cat with a mane; tiger: a
    large wild cat with stripes; monkey: a clever animal that climbs trees; giraffe: a tall animal with
    a very long neck; zebra: an animal with black and white stripes; camel: a desert animal with a hump;
    kangaroo: an animal that hops and carries its young in a pouch; penguin: a bird that swims but
    cannot fly; owl: a bird that hunts at night; eagle: a large bird that hunts by day; parrot: a
    colourful bird that can copy speech; duck: a bird that swims on ponds; hen: a bird that is kept for
    its eggs; fish: an animal that lives in water and has fins; shark: a large fish with sharp teeth;
    whale: the largest animal in the sea; crab: a sea animal with claws; turtle: a slow animal with a
    shell; snake: a long animal without legs; lizard: a small animal with a tail and four short legs;
    spider: a small animal with eight legs; bee: an insect that makes honey; ant: a tiny insect that
    lives in large groups; butterfly: an insect with large colourful wings; rain: water that falls from
    clouds; cloud: a mass of tiny drops of water in the sky; storm: bad weather with strong wind;
    thunder: the loud sound that follows lightning; rainbow: an arch of colours in the sky; wind: air
    that moves; ice: water that has frozen; fog: a thick cloud near the ground; star: a ball of burning
    gas far away in space; moon: the round body that circles the Earth; planet: a large body that
    circles a star; comet: a body of ice and dust with a long tail; winter: the coldest season of the
    year; summer: the warmest season of the year; spring: the season after winter; autumn: the season
    before winter; teacher: a person who helps others learn; doctor: a person who heals the sick; baker:
    a person who makes bread; farmer: a person who grows food; sailor: a person who works on a ship;
    pilot: a person who flies a plane; painter: a person who makes pictures; writer: a person who writes
    books; king: a man who rules a country; queen: a woman who rules a country; friend: a person whom
    you like and trust; neighbour: a person who lives near you; guest: a person who visits you; song:
    words that are set to music; drum: an instrument that is played by hitting it; piano: an instrument
    with black and white keys; violin: an instrument with four strings and a bow; flute: an instrument
    that is played by blowing; poem: a piece of writing with rhythm; letter: a written message to
    someone; book: a set of pages with writing on them; story: an account of things that happened;
    secret: something that only a few people know; game: something that is played for fun; triangle: a
    shape with three sides; square: a shape with four equal sides; circle: a perfectly round shape;
    minute: a time of sixty seconds; hour: a time of sixty minutes; week: a time of seven days; century:
    a time of one hundred years
    """
)
# These nouns take no article.
MASS_NOUNS = frozenset(
    words("cheese honey soup pasta rain thunder wind ice fog winter summer spring autumn breakfast dinner salad")
)
UNIQUE_NOUNS = frozenset({"moon"})

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

NAMES = words("""
    Ada Alan Alma Amir Ana Anders Anna Aria Arlo Asha Ben Bela Boris Bruno Carl Carla Chen Clara Cleo
    Dan Dara David Diego Dora Ed Edith Elena Eli Ella Emil Emma Enzo Eric Esther Eva Felix Finn Frida
    Gabi George Grace Greta Hana Hans Hugo Ida Igor Ines Ingrid Ivan Jack Jana Jin John Jonas Joy Judy
    Julia Kai Karl Kate Kenji Kira Lars Laura Lea Leo Lena Liam Lina Linus Lola Luca Lucy Luis Maja
    Marco Maria Mark Marta Max Maya Mia Mila Mona Nadia Nina Noah Nora Olga Oliver Omar Otto Paul Pedro
    Petra Pia Priya Rahul Ravi Rita Robin Rosa Ruth Sam Sana Sara Sven Sofia Tara Theo Tina Tom Uma Vera
    Victor Wei Will Yara Yuki Yusuf Zara Zoe
    """)
FOODS = words("pasta soup rice bread cheese salad pizza cake honey apples cherries noodles beans fish curry")
ANIMALS = words("dog cat horse rabbit parrot turtle fox owl penguin hamster goat duck lion whale")
JOBS = words("teacher doctor baker farmer sailor pilot painter writer gardener engineer singer cook nurse")
CITIES = tuple(city for city in CAPITALS.values() if city.isalpha())
