/* Read lines of events into columns in one pass: the compiled way of lines.py and templates.py.

   A kind of line is the text between its runs of digits, piece by piece, with what each run is to
   become (a role):

       {"name":"mlp","ts":   12   .   5   ,"args":{"layer":   7   ,"group":"tp@   0   "}}
                             whole    fraction              integer            text

   A line is compared with the kinds that followed the line before it the last few times; mostly one
   of them fits. Python learns new kinds: for a line that fits no kind, `scan` returns that line's
   number, and goes on from there when the kind has been learned (`learn`).

   The functions are called through ctypes with addresses of numpy arrays. They know nothing of
   Python, and threads may run them at once, each with kinds of its own. Nothing of a text is
   trusted: no byte outside of a line is read, and lines for which only the general parser can tell
   the values are UNFIT. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines"
#endif

#define EXPORT __attribute__((visibility("default")))

enum { UNFIT = -1, MOST_KINDS = 8192, SLOTS = 2 * MOST_KINDS, GUESSES = 4 };
enum { MOST_DIGITS = 18, MOST_DECIMALS = 15 }; /* as in templates.py */

/* What becomes of a run of digits, as templates.py numbers it. */
enum { NOTHING, INTEGER, WHOLE, FRACTION, TEXT };
enum { IS_NEGATIVE = 1, BEGINS_NUMBER = 2, BEGINS_TEXT = 4, ENDS_TEXT = 8 };

static const uint64_t POWERS[] = {
    1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000, 10000000000,
    100000000000, 1000000000000, 10000000000000, 100000000000000, 1000000000000000,
};
static const uint64_t LARGEST_EXACT = (uint64_t)1 << 53, PRIME = 0x100000001B3;

/* A run's part in its line; `around` bytes of a text stand before its first or after its last. */
typedef struct {
    int32_t action, flags, column, around[2];
} Role;

/* The text up to a run of digits, and that run's role; the last step of a kind has no run. */
typedef struct {
    const uint8_t *piece;
    int64_t size;
    Role role;
} Step;

/* A kind of line; what it is compared with stands behind its steps. */
typedef struct {
    uint64_t hash;
    int64_t num_runs;
    int32_t block, number;      /* the block in which it was met last, and its number there */
    int32_t followers[GUESSES]; /* what came next, the latest first, counted from 1 */
    Step steps[];
} Kind;

/* A run of digits in a line. */
typedef struct {
    const uint8_t *begin;
    uint64_t value;
    int64_t length;
} Run;

typedef struct {
    Kind *kinds[MOST_KINDS];
    int32_t slots[SLOTS]; /* kinds by hash, counted from 1 */
    int32_t first[GUESSES]; /* what blocks began with */
    int32_t num, block;
    int64_t most_runs;
    Run *runs; /* those of the line that is read */
} Kinds;

/* A column's values by line, and the largest numbers that are checked when all lines are read. */
typedef struct {
    void *values;
    int64_t width; /* bytes a value */
    uint64_t most_whole;
    int64_t most_decimals;
    int32_t *slots;    /* of a column of texts: texts by hash, counted from 1 */
    int64_t num_slots; /* a power of two, and more than there are lines */
    int64_t *samples;  /* begin and end of each text in the block */
    int64_t num_samples;
} Column;

typedef struct {
    const uint8_t *text;
    int64_t size;
    const int64_t *bounds; /* of the lines, one more than lines */
    int64_t num_lines;
    Column *columns;
    int32_t *code;  /* the number of each line's kind */
    int32_t *order; /* the kinds in the order of their numbers */
    int64_t num_kinds;
} Block;

typedef struct {
    const uint8_t *at, *end;
} Text;

/* The checksum of the text that this library was made of. */
EXPORT uint32_t source(void) { return SOURCE; }

/* ---- Lines --------------------------------------------------------------------------------- */

/* Overwrite commas at line ends by spaces, and find the ends of all lines. Of lines that do not
   begin with { and end with }, or with } and a space, the first three are put into `others`, and
   how many there are into others[3]. Return the number of lines, or more than `room`, if there are
   more: then some were not looked at. */
EXPORT int64_t split(uint8_t *text, int64_t size, int64_t *ends, int64_t room, int64_t *others) {
    int64_t begin = 0, num = 0;
    others[3] = 0;
    for (int is_last = 0; !is_last && num < room; num++) {
        const uint8_t *found = memchr(text + begin, '\n', (size_t)(size - begin));
        int64_t end = found ? found - text : size;
        is_last = !found;
        int64_t close = end - 1;
        if (end > begin) {
            if (text[close] == ',') text[close] = ' ';
            if (text[close] == ' ') close--;
        }
        if (close < begin || text[begin] != '{' || text[close] != '}') {
            if (others[3] < 3) others[others[3]] = num;
            others[3]++;
        }
        ends[num] = end;
        begin = end + 1;
    }
    return begin > size ? num : room + 1;
}

/* ---- Digits -------------------------------------------------------------------------------- */

static int is_digit(uint8_t byte) { return (uint8_t)(byte - '0') < 10; }

/* The next eight bytes; zeros stand behind the end. */
static inline uint64_t word_at(Text text) {
    uint64_t word = 0;
    int64_t left = text.end - text.at;
    memcpy(&word, text.at, left >= 8 ? 8 : (size_t)left);
    return word;
}

/* How many of the eight bytes, from the lowest on, are digits. */
static inline int num_digits(uint64_t word) {
    uint64_t distance = word ^ 0x3030303030303030;
    uint64_t above = (distance & 0x7F7F7F7F7F7F7F7F) + 0x7676767676767676;
    uint64_t others = (above | distance) & 0x8080808080808080;
    return others ? __builtin_ctzll(others) >> 3 : 8;
}

/* The value of eight digits, the first one in the lowest byte; zero bytes count as zeros. */
static inline uint64_t value_of(uint64_t word) {
    word &= 0x0F0F0F0F0F0F0F0F;
    word = (word * 10 + (word >> 8)) & 0x00FF00FF00FF00FF;
    word = (word * 100 + (word >> 16)) & 0x0000FFFF0000FFFF;
    return (word * 10000 + (word >> 32)) & 0xFFFFFFFF;
}

/* Read a run of digits; beyond 18 of them the value means nothing. */
static inline Run read_run(Text line) {
    Run run = {line.at, 0, 0};
    int num = 8;
    while (num == 8) {
        uint64_t word = word_at(line);
        num = num_digits(word);
        if (num) run.value = run.value * POWERS[num] + value_of(word << (64 - 8 * num));
        run.length += num;
        line.at += num;
    }
    return run;
}

/* ---- Kinds of line ------------------------------------------------------------------------- */

static inline uint64_t eight_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint32_t four_at(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* Compare by words, of which the last may overlap the one before it. */
static inline int equal(const uint8_t *one, const uint8_t *other, int64_t size) {
    if (size >= 8) {
        for (int64_t at = 0; at < size - 8; at += 8)
            if (eight_at(one + at) != eight_at(other + at)) return 0;
        return eight_at(one + size - 8) == eight_at(other + size - 8);
    }
    if (size >= 4) {
        int64_t last = size - 4;
        return four_at(one) == four_at(other) && four_at(one + last) == four_at(other + last);
    }
    for (int64_t at = 0; at < size; at++)
        if (one[at] != other[at]) return 0;
    return 1;
}

/* Return whether a line is of a kind, and read its runs of digits. */
static int is_of(const Kind *kind, Text line, Run *runs) {
    for (const Step *step = kind->steps;; step++, runs++) {
        if (line.end - line.at < step->size || !equal(line.at, step->piece, step->size)) return 0;
        line.at += step->size;
        if (step == kind->steps + kind->num_runs) return line.at == line.end;
        *runs = read_run(line);
        if (!runs->length) return 0;
        line.at += runs->length;
    }
}

/* Hash what stands between the digits. */
static uint64_t hash_of(Text line) {
    uint64_t hash = 0;
    for (int was_digit = 0; line.at < line.end; line.at++) {
        int digit = is_digit(*line.at);
        if (!digit || !was_digit) hash = (hash ^ (digit ? '0' : *line.at)) * PRIME;
        was_digit = digit;
    }
    return hash ^ hash >> 32;
}

/* Return the place of a line's kind, or the free one that it would take; -1 if there is none. */
static int64_t slot_of(const Kinds *kinds, Text line, uint64_t hash) {
    for (int64_t tried = 0; tried < SLOTS; tried++) {
        int64_t slot = (int64_t)((hash + (uint64_t)tried) % SLOTS);
        const Kind *kind = kinds->slots[slot] ? kinds->kinds[kinds->slots[slot] - 1] : NULL;
        if (!kind || (kind->hash == hash && is_of(kind, line, kinds->runs))) return slot;
    }
    return -1;
}

/* Find the kind of a line, by what followed the last one; 0 if it is not known. */
static int32_t find(const Kinds *kinds, int32_t *followers, Text line) {
    int nth = 0;
    int32_t found = 0;
    for (; nth < GUESSES && followers[nth] && !found; nth++)
        if (is_of(kinds->kinds[followers[nth] - 1], line, kinds->runs)) found = followers[nth];
    if (found) nth--;
    else {
        int64_t slot = slot_of(kinds, line, hash_of(line));
        found = slot < 0 ? 0 : kinds->slots[slot];
        if (!found) return 0;
        if (nth == GUESSES) nth--;
    }
    for (; nth > 0; nth--) followers[nth] = followers[nth - 1];
    followers[0] = found;
    return found;
}

EXPORT Kinds *new_kinds(void) { return calloc(1, sizeof(Kinds)); }

EXPORT void free_kinds(Kinds *kinds) {
    for (int32_t number = 0; number < kinds->num; number++) free(kinds->kinds[number]);
    free(kinds->runs);
    free(kinds);
}

/* Learn the kind of a line with so many runs of digits; return 0, or UNFIT for want of room. */
EXPORT int32_t learn(Kinds *kinds, const uint8_t *text, int64_t size, const Role *roles,
                     int64_t num_runs) {
    Text line = {text, text + size};
    uint64_t hash = hash_of(line);
    int64_t slot = slot_of(kinds, line, hash);
    if (kinds->num == MOST_KINDS || slot < 0 || kinds->slots[slot]) return UNFIT;
    if (num_runs > kinds->most_runs) {
        Run *runs = realloc(kinds->runs, (size_t)num_runs * sizeof(Run));
        if (!runs) return UNFIT;
        kinds->runs = runs;
        kinds->most_runs = num_runs;
    }
    size_t steps_size = (size_t)(num_runs + 1) * sizeof(Step);
    Kind *kind = calloc(1, sizeof(Kind) + steps_size + (size_t)size);
    if (!kind) return UNFIT;
    uint8_t *copy = (uint8_t *)kind + sizeof(Kind) + steps_size;
    kind->hash = hash;
    kind->num_runs = num_runs;
    memcpy(copy, text, (size_t)size);
    line = (Text){copy, copy + size};
    for (int64_t run = 0; run <= num_runs; run++) {
        Step *step = kind->steps + run;
        step->piece = line.at;
        while (line.at < line.end && !is_digit(*line.at)) line.at++;
        step->size = line.at - step->piece;
        if (run < num_runs) step->role = roles[run];
        while (line.at < line.end && is_digit(*line.at)) line.at++;
    }
    if (!is_of(kind, (Text){text, text + size}, kinds->runs)) {
        free(kind); /* the line has another number of runs */
        return UNFIT;
    }
    kinds->kinds[kinds->num++] = kind;
    kinds->slots[slot] = kinds->num;
    return 0;
}

/* ---- Columns ------------------------------------------------------------------------------- */

static int put_integer(const Column *column, int64_t line, int64_t value) {
    switch (column->width) {
    case 1: ((int8_t *)column->values)[line] = (int8_t)value; return value == (int8_t)value;
    case 4: ((int32_t *)column->values)[line] = (int32_t)value; return value == (int32_t)value;
    case 8: ((int64_t *)column->values)[line] = value; return 1;
    default: return 0;
    }
}

/* Put whole.fraction as (whole · 10^n + fraction) / 10^n; what is too large is found by
   `is_exact`. */
static int put_decimal(Column *column, int64_t line, const Run *whole, const Run *fraction,
                       int is_negative) {
    int64_t decimals = fraction ? fraction->length : 0;
    if (decimals > MOST_DECIMALS || column->width != sizeof(double)) return 0;
    uint64_t scaled = whole->value * POWERS[decimals] + (fraction ? fraction->value : 0);
    if (whole->value > column->most_whole) column->most_whole = whole->value;
    if (decimals > column->most_decimals) column->most_decimals = decimals;
    double value = (double)(int64_t)(is_negative ? 0 - scaled : scaled);
    ((double *)column->values)[line] = value / (double)POWERS[decimals];
    return 1;
}

/* Number a text by the first line that has it. */
static void put_text(const Block *block, Column *column, int64_t line, Text text) {
    uint64_t hash = 0;
    for (const uint8_t *at = text.at; at < text.end; at++) hash = (hash ^ *at) * PRIME;
    uint64_t mask = (uint64_t)column->num_slots - 1, slot = (hash ^ hash >> 32) & mask;
    for (; column->slots[slot]; slot = (slot + 1) & mask) {
        const int64_t *sample = column->samples + 2 * (column->slots[slot] - 1);
        int64_t size = sample[1] - sample[0];
        if (size == text.end - text.at && equal(block->text + sample[0], text.at, size)) break;
    }
    if (!column->slots[slot]) {
        int64_t *sample = column->samples + 2 * column->num_samples;
        sample[0] = text.at - block->text;
        sample[1] = text.end - block->text;
        column->slots[slot] = (int32_t)++column->num_samples;
    }
    ((int32_t *)column->values)[line] = column->slots[slot] - 1;
}

/* Put a line's numbers and texts into their columns; return whether all fit. */
static int put(const Block *block, const Kind *kind, const Run *runs, int64_t line) {
    const uint8_t *text_begin = NULL;
    for (int64_t nth = 0; nth < kind->num_runs; nth++) {
        const Run *run = runs + nth;
        const Role *role = &kind->steps[nth].role;
        int flags = role->flags, fits = 1;
        if (run->length > 1 && *run->begin == '0' && flags & BEGINS_NUMBER) return 0;
        if (role->action == NOTHING) continue;
        if (run->length > MOST_DIGITS) return 0;
        Column *column = block->columns + role->column;
        if (role->action == INTEGER) {
            int64_t value = (int64_t)run->value;
            fits = put_integer(column, line, flags & IS_NEGATIVE ? -value : value);
        } else if (role->action == WHOLE) {
            fits = put_decimal(column, line, run, NULL, flags & IS_NEGATIVE);
        } else if (role->action == FRACTION) {
            fits = put_decimal(column, line, run - 1, run, flags & IS_NEGATIVE);
        } else {
            if (flags & BEGINS_TEXT) text_begin = run->begin - role->around[0];
            Text text = {text_begin, run->begin + run->length + role->around[1]};
            if (flags & ENDS_TEXT) put_text(block, column, line, text);
        }
        if (!fits) return 0;
    }
    return 1;
}

/* Return the number of a kind in this block, its kinds being numbered as they are met. */
static int32_t number_of(Kinds *kinds, Block *block, int32_t which) {
    Kind *kind = kinds->kinds[which];
    if (kind->block != kinds->block) {
        kind->block = kinds->block;
        kind->number = (int32_t)block->num_kinds;
        block->order[block->num_kinds++] = which;
    }
    return kind->number;
}

/* Read lines into columns from a line on; 0 begins a block. Return the number of a line whose kind
   is to be learned before this is called again, the number of lines when all are read, or UNFIT.

   `columns` hold what stands for an absent value in every line; `order` has room for as many kinds
   as there are lines. */
EXPORT int64_t scan(Kinds *kinds, Block *block, int64_t line) {
    int32_t *followers = kinds->first;
    if (line) followers = kinds->kinds[block->order[block->code[line - 1]]]->followers;
    else kinds->block++;
    for (; line < block->num_lines; line++) {
        int64_t begin = block->bounds[line], end = block->bounds[line + 1];
        if (begin < 0 || begin >= end || end > block->size) return UNFIT;
        if (is_digit(block->text[begin]) || is_digit(block->text[end - 1])) return UNFIT;
        Text text = {block->text + begin, block->text + end};
        int32_t found = find(kinds, followers, text);
        if (!found) return line;
        Kind *kind = kinds->kinds[found - 1];
        block->code[line] = number_of(kinds, block, found - 1);
        if (!put(block, kind, kinds->runs, line)) return UNFIT;
        followers = kind->followers;
    }
    return line;
}

/* Return whether a column's decimals are exact as doubles that are divided once. */
EXPORT int32_t is_exact(const Column *column) {
    return column->most_whole < LARGEST_EXACT / POWERS[column->most_decimals] - 1;
}
