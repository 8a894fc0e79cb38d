/* What numpy does in a dozen passes over a block, in one: lines to numbers, columns to text.

   Called through ctypes with the addresses of numpy arrays (megascan/native.py, which checks their
   types and sizes), so it knows nothing of Python and holds no lock. Every function is pure: it
   reads and writes the arrays that it is given and keeps nothing. Nothing of the text is trusted:
   no byte beyond its end is read, and a function that meets what only the general parser can tell
   returns UNFIT, upon which everything is done the long way. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "written for little-endian machines; others go without"
#endif

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { DONE = 0, UNFIT = 1 };
enum { NOT_APPLICABLE = -1, NONE = -1, MARK = 1, MOST_DIGITS = 18, MOST_DECIMALS = 15 };

typedef struct {
    const uint8_t *at, *end;
} Text;

static const uint64_t HIGH_BITS = 0x8080808080808080, GOLDEN = 0x9E3779B97F4A7C15;
static const int64_t LARGEST_EXACT = (int64_t)1 << 53;

static const int64_t POWERS[] = {
    1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000, 1000000000, 10000000000,
    100000000000, 1000000000000, 10000000000000, 100000000000000, 1000000000000000,
};

/* Which text this was made of: its CRC-32, which the builder passes. */
EXPORT uint32_t megascan_source(void) { return SOURCE; }

/* Count the lines of a text. */
EXPORT int64_t megascan_count(const uint8_t *text, int64_t size) {
    int64_t num = 1;
    for (int64_t place = 0; place < size; place++) num += text[place] == '\n';
    return num;
}

/* ---- Lines --------------------------------------------------------------------------------- */

static int is_space(uint8_t byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

static int is_only(const uint8_t *text, int64_t begin, int64_t end, uint8_t wanted) {
    while (begin < end && is_space(text[begin])) begin++;
    while (begin < end && is_space(text[end - 1])) end--;
    return end - begin == 1 && text[begin] == wanted;
}

static int is_object(const uint8_t *text, int64_t begin, int64_t end) {
    if (end <= begin || text[begin] != '{') return 0;
    return text[end - 1 - (text[end - 1] == ' ')] == '}';
}

/* Overwrite what stands between the lines of an array by spaces. bounds[0 … num_lines] get the
   begin of each line, and of what follows the last; rows[0], rows[1] the lines that hold objects,
   none unless all between the brackets do. */
EXPORT int32_t megascan_lines(uint8_t *text, int64_t size, int64_t *bounds, int64_t num_lines,
                              int64_t *rows) {
    int64_t begin = 0, start = 0, stop = num_lines;
    for (int64_t line = 0; line < num_lines; line++) {
        const uint8_t *found = memchr(text + begin, '\n', (size_t)(size - begin));
        int64_t end = found ? found - text : size;
        if ((found == NULL) != (line == num_lines - 1)) return UNFIT;
        if (end > 0 && text[end - 1] == ',') text[end - 1] = ' ';
        bounds[line] = begin;
        begin = end + 1;
    }
    bounds[num_lines] = begin;
    if (is_only(text, 0, bounds[1] - 1, '[')) {
        text[0] = ' ';
        start = 1;
    }
    if (stop > start + 1 && is_only(text, bounds[stop - 1], size, ']')) {
        stop--;
        memset(text + bounds[stop], ' ', (size_t)(size - bounds[stop]));
    }
    rows[0] = start;
    for (int64_t line = start; line < stop; line++)
        if (!is_object(text, bounds[line], bounds[line + 1] - 1)) stop = start;
    rows[1] = stop;
    bounds[num_lines] = size;
    return DONE;
}

/* ---- Digits and kinds of line -------------------------------------------------------------- */

static uint64_t mask_of(int num_bytes) {
    return num_bytes < 8 ? ((uint64_t)1 << 8 * num_bytes) - 1 : ~(uint64_t)0;
}

/* The next eight bytes; zeros stand behind the end. */
static uint64_t word_at(Text text) {
    uint64_t word = 0;
    if (text.end - text.at >= 8) memcpy(&word, text.at, 8);
    else
        for (const uint8_t *last = text.end; last > text.at;) word = word << 8 | *--last;
    return word;
}

/* The highest bit of each byte that is no digit. */
static uint64_t non_digits(uint64_t word) {
    uint64_t distance = word ^ 0x3030303030303030;
    uint64_t above = (distance & 0x7F7F7F7F7F7F7F7F) + 0x7676767676767676;
    return (above | distance) & HIGH_BITS;
}

static int bytes_before(uint64_t marks) { return marks ? __builtin_ctzll(marks) >> 3 : 8; }

/* The value of eight digits, the first one in the lowest byte; zero bytes count as zeros. */
static uint64_t eight_digits(uint64_t word) {
    word &= 0x0F0F0F0F0F0F0F0F;
    word = (word * 10 + (word >> 8)) & 0x00FF00FF00FF00FF;
    word = (word * 100 + (word >> 16)) & 0x0000FFFF0000FFFF;
    return (word * 10000 + (word >> 32)) & 0xFFFFFFFF;
}

enum { LEADING_ZERO = 1 << 30 };

/* Go on with a run of more than seven digits; beyond 18 the value means nothing. */
static const uint8_t *read_long_run(Text text, int64_t *value) {
    uint64_t sum = 0;
    int num = 8;
    while (num == 8 && text.at < text.end) {
        uint64_t word = word_at(text);
        num = bytes_before(non_digits(word));
        if (num) sum = sum * (uint64_t)POWERS[num] + eight_digits(word << (64 - 8 * num));
        text.at += num;
    }
    *value = (int64_t)sum;
    return text.at;
}

/* Read a run of digits and return what follows it. A flag in the length says that there are
   several digits, the first a zero. */
static inline const uint8_t *read_run(Text text, int64_t *value, int32_t *length) {
    uint64_t word = word_at(text);
    int num = bytes_before(non_digits(word));
    const uint8_t *after = text.at + num;
    *value = num ? (int64_t)eight_digits(word << (64 - 8 * num)) : 0;
    if (num == 8) after = read_long_run(text, value);
    *length = (int32_t)(after - text.at);
    *length |= LEADING_ZERO * (num > 1 && (uint8_t)word == '0');
    return after;
}

/* Return where the next digit stands; `hash` takes in what stands before it. */
static const uint8_t *read_piece(Text text, uint64_t *hash) {
    int num = 8;
    while (num == 8 && text.at < text.end) {
        uint64_t word = word_at(text);
        num = bytes_before(~non_digits(word) & HIGH_BITS);
        *hash = ((*hash << 5 | *hash >> 59) ^ (word & mask_of(num))) * GOLDEN;
        text.at += num;
    }
    return text.at < text.end ? text.at : text.end;
}

static uint64_t hash_of(Text line) {
    uint64_t hash = 0;
    int64_t value;
    int32_t length;
    while (line.at < line.end) {
        line.at = read_piece(line, &hash);
        if (line.at < line.end) line.at = read_run(line, &value, &length);
    }
    return hash ^ hash >> 32;
}

typedef struct {
    uint8_t *bare; /* the kinds' lines one after the other, with one mark for each run of digits */
    int64_t *bare_end;
    int32_t *pieces; /* bytes between those marks */
    int64_t *pieces_end;
    int64_t num;
} Kinds;

static int64_t before(const int64_t *ends, int64_t kind) { return kind ? ends[kind - 1] : 0; }

/* Put a line's runs of digits behind the others if it is of a kind; return how many, else NONE. */
static int64_t read_as(const Kinds *kinds, int64_t kind, Text line, int64_t *value,
                       int32_t *length) {
    const uint8_t *bare = kinds->bare + before(kinds->bare_end, kind);
    int64_t first = before(kinds->pieces_end, kind), last = kinds->pieces_end[kind] - 1;
    for (int64_t piece = first;; piece++) {
        int64_t size = kinds->pieces[piece];
        if (size > line.end - line.at) return NONE;
        for (; size > 0; size -= 8) {
            int num = size < 8 ? (int)size : 8;
            uint64_t wanted;
            memcpy(&wanted, bare, 8);
            if ((word_at(line) ^ wanted) & mask_of(num)) return NONE;
            bare += num;
            line.at += num;
        }
        if (piece == last) return line.at == line.end ? last - first : NONE;
        const uint8_t *begin = line.at;
        line.at = read_run(line, value++, length++);
        if (line.at == begin) return NONE;
        bare++;
    }
}

static void learn(Kinds *kinds, Text line) {
    int64_t kind = kinds->num++;
    uint8_t *bare = kinds->bare + before(kinds->bare_end, kind);
    int32_t *piece = kinds->pieces + before(kinds->pieces_end, kind);
    int64_t value;
    int32_t length;
    uint64_t hash = 0;
    for (;;) {
        const uint8_t *begin = line.at;
        line.at = read_piece(line, &hash);
        *piece = (int32_t)(line.at - begin);
        memcpy(bare, begin, (size_t)*piece);
        bare += *piece++;
        if (line.at == line.end) break;
        line.at = read_run(line, &value, &length);
        *bare++ = MARK;
    }
    kinds->bare_end[kind] = bare - kinds->bare;
    kinds->pieces_end[kind] = piece - kinds->pieces;
}

enum { SLOTS = 1 << 13, MOST_KINDS = SLOTS / 2, GUESSES = 4 };

typedef struct {
    uint64_t hash[SLOTS];
    int32_t kind[SLOTS]; /* counted from 1 */
    int32_t next[MOST_KINDS + 1][GUESSES]; /* what followed a kind, the last one first */
} Memory;

/* Find the kind of a line by its hash, learning it if need be; return how many runs it has, NONE if
   there are too many kinds. */
static int64_t look_up(Kinds *kinds, Memory *memory, Text line, int32_t *kind, int64_t *value,
                         int32_t *length) {
    uint64_t hash = hash_of(line);
    int64_t slot = (int64_t)(hash & (SLOTS - 1)), num_runs;
    for (; memory->kind[slot]; slot = (slot + 1) & (SLOTS - 1)) {
        if (memory->hash[slot] != hash) continue;
        num_runs = read_as(kinds, memory->kind[slot] - 1, line, value, length);
        if (num_runs != NONE) {
            *kind = memory->kind[slot] - 1;
            return num_runs;
        }
    }
    if (kinds->num == MOST_KINDS) return NONE;
    memory->hash[slot] = hash;
    *kind = (int32_t)kinds->num;
    memory->kind[slot] = *kind + 1;
    learn(kinds, line);
    return read_as(kinds, *kind, line, value, length);
}

/* Read a line as a kind that followed the one before it, else as whichever it is. */
static int64_t read_line(Kinds *kinds, Memory *memory, Text line, int32_t previous, int32_t *kind,
                         int64_t *value, int32_t *length) {
    int32_t *guess = memory->next[previous];
    int64_t num_runs = NONE;
    int nth = 0;
    for (; nth < GUESSES && guess[nth] && num_runs == NONE; nth++) {
        *kind = guess[nth] - 1;
        num_runs = read_as(kinds, *kind, line, value, length);
    }
    if (num_runs == NONE) {
        num_runs = look_up(kinds, memory, line, kind, value, length);
        nth += nth < GUESSES;
    }
    if (num_runs == NONE) return NONE;
    for (nth--; nth > 0; nth--) guess[nth] = guess[nth - 1];
    guess[0] = *kind + 1;
    return num_runs;
}

typedef struct {
    int64_t num_kinds, num_runs, num_zeros;
} Counts;

/* Take the flags off the lengths of a line's runs, and note the runs that had one. */
static void note_zeros(int64_t line, int64_t run, int64_t num_runs, int32_t *length,
                       int64_t *zero_run, int64_t *zero_line, Counts *counts) {
    for (int64_t stop = run + num_runs; run < stop; run++) {
        if (length[run] & LEADING_ZERO) {
            length[run] &= ~LEADING_ZERO;
            zero_run[counts->num_zeros] = run;
            zero_line[counts->num_zeros++] = line;
        }
    }
}

/* Read lines text[bounds[i]:bounds[i + 1]] as digits and what stands around them.

   A line is first compared with the kinds that followed the one before it the last times: then it
   is read once, and what stands between its digits is not looked at byte by byte. Out come the kind
   of each line, numbered by first appearance, and its first run; value and length of each run; the
   runs of several digits that begin with a zero, and their lines; of each kind its line with marks
   (in room for size + 8), where that ends, and the first such line (MOST_KINDS each). What is by
   run, and `pieces`, has `room`; lines that may need more are UNFIT. */
EXPORT int32_t megascan_scan(const uint8_t *text, int64_t size, const int64_t *bounds,
                             int64_t num_lines, int64_t room, int32_t *code, int64_t *first,
                             int64_t *value, int32_t *length, int64_t *zero_run,
                             int64_t *zero_line, uint8_t *bare, int64_t *bare_end,
                             int64_t *kind_line, int32_t *pieces, Counts *counts) {
    int64_t pieces_end[MOST_KINDS];
    Kinds kinds = {bare, bare_end, pieces, pieces_end, 0};
    Memory *memory = size < LEADING_ZERO ? calloc(1, sizeof *memory) : NULL;
    int32_t previous = 0, result = memory ? DONE : UNFIT;
    memset(counts, 0, sizeof *counts);
    for (int64_t line = 0; line < num_lines && result == DONE; line++) {
        int64_t begin = bounds[line], end = bounds[line + 1], run = counts->num_runs;
        result = UNFIT;
        if (begin < 0 || begin >= end || end > size) break;
        int64_t most = (end - begin) / 2 + 2; /* runs and pieces, whichever kind is tried */
        if (run + most > room || before(pieces_end, kinds.num) + most > room) break;
        Text whole = {text + begin, text + end};
        int64_t num_kinds = kinds.num;
        int32_t kind;
        int64_t found =
            read_line(&kinds, memory, whole, previous, &kind, value + run, length + run);
        if (found == NONE) break;
        result = DONE;
        previous = kind + 1;
        if (kinds.num > num_kinds) kind_line[kind] = line;
        code[line] = kind;
        first[line] = run;
        note_zeros(line, run, found, length, zero_run, zero_line, counts);
        counts->num_runs += found;
    }
    free(memory);
    first[num_lines] = counts->num_runs;
    counts->num_kinds = kinds.num;
    return result;
}

/* ---- Columns of numbers and texts from digits ---------------------------------------------- */

typedef struct {
    int64_t num_lines;
    const int32_t *code;
    const int64_t *first, *value;
    const int32_t *length;
} Lines;

/* Return a line's run at the place that its kind says; NONE where it says none, and -2 for what
   has too many digits. */
static int64_t run_of(const Lines *lines, int64_t line, int64_t place) {
    if (place == NONE) return NONE;
    int64_t run = lines->first[line] + place;
    return run < lines->first[line + 1] && lines->length[run] <= MOST_DIGITS ? run : -2;
}

/* A column of integers of `width` bytes; by kind, where the digits are and whether a minus. */
EXPORT int32_t megascan_integers(const Lines *lines, const int64_t *place, const uint8_t *negative,
                                 int32_t width, void *out) {
    int64_t limit = width == 8 ? INT64_MAX : ((int64_t)1 << (8 * width - 1)) - 1;
    for (int64_t line = 0; line < lines->num_lines; line++) {
        int32_t kind = lines->code[line];
        int64_t run = run_of(lines, line, place[kind]);
        if (run < NONE) return UNFIT;
        int64_t value = run == NONE ? NOT_APPLICABLE : lines->value[run];
        if (negative[kind] && run != NONE) value = -value;
        if (value > limit || value < -limit - 1) return UNFIT;
        if (width == 8) ((int64_t *)out)[line] = value;
        else if (width == 4) ((int32_t *)out)[line] = (int32_t)value;
        else ((int8_t *)out)[line] = (int8_t)value;
    }
    return DONE;
}

/* A column of decimals: whole.fraction is (whole · 10^n + fraction) / 10^n, exact integers and one
   rounding. */
EXPORT int32_t megascan_decimals(const Lines *lines, const int64_t *whole, const int64_t *fraction,
                                 const uint8_t *negative, double missing, double *out) {
    int64_t largest = 0;
    int32_t most = 0;
    for (int64_t line = 0; line < lines->num_lines; line++) {
        int32_t kind = lines->code[line], digits = 0;
        int64_t run = run_of(lines, line, whole[kind]), part = run_of(lines, line, fraction[kind]);
        if (run < NONE || part < NONE) return UNFIT;
        out[line] = missing;
        if (run == NONE) continue;
        int64_t scaled = lines->value[run];
        if (scaled > largest) largest = scaled;
        if (part != NONE) digits = lines->length[part];
        if (digits > most) most = digits;
        if (most > MOST_DECIMALS || largest >= LARGEST_EXACT / POWERS[most] - 1) return UNFIT;
        scaled = scaled * POWERS[digits] + (part == NONE ? 0 : lines->value[part]);
        out[line] = (double)(negative[kind] ? -scaled : scaled) / (double)POWERS[digits];
    }
    return DONE;
}

typedef struct {
    const int32_t *text; /* by kind: its text's number, or NONE less that of its pattern */
    const int64_t *begin; /* by kind: its first place, one more at the end */
    const int64_t *place;
} Patterns;

static int is_same_text(const Lines *lines, const Patterns *patterns, int64_t line, int64_t other) {
    int32_t kind = lines->code[line], his_kind = lines->code[other];
    if (patterns->text[kind] != patterns->text[his_kind]) return 0;
    const int64_t *place = patterns->place + patterns->begin[kind];
    const int64_t *his = patterns->place + patterns->begin[his_kind];
    for (int64_t left = patterns->begin[kind + 1] - patterns->begin[kind]; left > 0; left--) {
        int64_t run = lines->first[line] + *place++, his_run = lines->first[other] + *his++;
        if (lines->value[run] != lines->value[his_run]) return 0;
        if (lines->length[run] != lines->length[his_run]) return 0;
    }
    return 1;
}

/* Number the texts of a column: those that hold digits count down from NONE, by first appearance.
   sample[i] is the first line that has the i-th of them; it and `slots` (a power of two of them,
   blank) have room for more than there are lines. */
EXPORT int32_t megascan_texts(const Lines *lines, const Patterns *patterns, int32_t *slots,
                              int64_t num_slots, int32_t *out, int64_t *sample, int64_t *num) {
    *num = 0;
    for (int64_t line = 0; line < lines->num_lines; line++) {
        int32_t kind = lines->code[line];
        uint64_t hash = (uint64_t)(out[line] = patterns->text[kind]);
        if (out[line] >= 0) continue;
        for (int64_t at = patterns->begin[kind]; at < patterns->begin[kind + 1]; at++) {
            int64_t run = run_of(lines, line, patterns->place[at]);
            if (run < 0) return UNFIT;
            uint64_t digits = (uint64_t)lines->value[run] * 32 + (uint64_t)lines->length[run];
            hash = ((hash << 5 | hash >> 59) ^ digits) * GOLDEN;
        }
        int64_t slot = (int64_t)((hash ^ hash >> 32) & (uint64_t)(num_slots - 1));
        while (slots[slot] && !is_same_text(lines, patterns, line, sample[slots[slot] - 1]))
            slot = (slot + 1) & (num_slots - 1);
        if (!slots[slot]) {
            sample[*num] = line;
            slots[slot] = (int32_t)++*num;
        }
        out[line] = NONE - (slots[slot] - 1);
    }
    return DONE;
}

/* ---- Rows of text -------------------------------------------------------------------------- */

enum { CONSTANT, FRAGMENT, WHOLE, MICROSECONDS, NUMBER_BYTES = 24 };

typedef struct {
    int64_t kind;
    const uint8_t *data; /* the text, or of fragments all texts one after the other */
    const int32_t *ends; /* of fragments: where each begins, and the last one ends */
    const int64_t *values; /* by row: which fragment, or the number */
    int64_t size; /* of the text, or how many fragments */
} Part;

/* Copy a few bytes without a call. */
static uint8_t *put_bytes(uint8_t *out, const uint8_t *bytes, int64_t size) {
    if (size > 32 || size < 4) {
        memcpy(out, bytes, (size_t)size);
    } else if (size < 8) {
        memcpy(out, bytes, 4);
        memcpy(out + size - 4, bytes + size - 4, 4);
    } else {
        int64_t half = size <= 16 ? 8 : 16;
        for (int64_t place = 0; place < half; place += 8) {
            memcpy(out + place, bytes + place, 8);
            memcpy(out + size - half + place, bytes + size - half + place, 8);
        }
    }
    return out + size;
}

static uint8_t *put_number(uint8_t *out, uint64_t value) {
    static const char pairs[] =
        "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
        "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
        "8081828384858687888990919293949596979899";
    uint8_t text[NUMBER_BYTES], *at = text + sizeof text;
    for (; value >= 100; value /= 100) memcpy(at -= 2, pairs + 2 * (value % 100), 2);
    if (value >= 10) memcpy(at -= 2, pairs + 2 * value, 2);
    else *--at = (uint8_t)('0' + value);
    return put_bytes(out, at, text + sizeof text - at);
}

static uint8_t *put_signed(uint8_t *out, int64_t value) {
    if (value < 0) *out++ = '-';
    return put_number(out, value < 0 ? -(uint64_t)value : (uint64_t)value);
}

/* Nanoseconds as microseconds: at least one decimal, no zeros behind it. */
static uint8_t *put_microseconds(uint8_t *out, int64_t value_ns) {
    uint64_t value = value_ns < 0 ? -(uint64_t)value_ns : (uint64_t)value_ns, rest = value % 1000;
    if (value_ns < 0) *out++ = '-';
    out = put_number(out, value / 1000);
    *out++ = '.';
    *out++ = (uint8_t)('0' + rest / 100);
    if (rest % 100) *out++ = (uint8_t)('0' + rest / 10 % 10);
    if (rest % 10) *out++ = (uint8_t)('0' + rest % 10);
    return out;
}

/* Return how many bytes the texts of some rows take at most; NONE where a number is so large that
   its decimals are not those of the nearest double, or a fragment is not there. */
EXPORT int64_t megascan_room(const Part *parts, int64_t num_parts, const int64_t *rows,
                             int64_t num_rows) {
    int64_t room = 0, most = LARGEST_EXACT / 2;
    for (const Part *part = parts; part < parts + num_parts; part++) {
        if (part->kind == CONSTANT) room += part->size * num_rows;
        else if (part->kind != FRAGMENT) room += NUMBER_BYTES * num_rows;
        for (int64_t row = 0; row < num_rows && part->kind != CONSTANT; row++) {
            int64_t value = part->values[rows[row]];
            if (part->kind == FRAGMENT) {
                if (value < 0 || value >= part->size) return NONE;
                room += part->ends[value + 1] - part->ends[value];
            } else if (part->kind == MICROSECONDS && (value >= most || value <= -most)) {
                return NONE;
            }
        }
    }
    return room;
}

/* Write the parts of each row one after the other, numbers with a comma; return how many bytes. */
EXPORT int64_t megascan_join(const Part *parts, int64_t num_parts, const int64_t *rows,
                             int64_t num_rows, uint8_t *out) {
    const uint8_t *begin = out;
    for (int64_t row = 0; row < num_rows; row++) {
        for (const Part *part = parts; part < parts + num_parts; part++) {
            if (part->kind == CONSTANT) {
                out = put_bytes(out, part->data, part->size);
                continue;
            }
            int64_t value = part->values[rows[row]];
            if (part->kind == FRAGMENT) {
                int32_t begin_of = part->ends[value];
                out = put_bytes(out, part->data + begin_of, part->ends[value + 1] - begin_of);
                continue;
            }
            out = part->kind == WHOLE ? put_signed(out, value) : put_microseconds(out, value);
            *out++ = ',';
        }
    }
    return out - begin;
}

/* ---- Messages ------------------------------------------------------------------------------ */

enum { VARINT, FIXED64 };

typedef struct {
    int64_t kind, at, width; /* its bytes stand at message[at … at + width - 1] */
    const uint64_t *values;
    const int64_t *rows; /* which of the values each message has; without, one after the other */
} Column;

/* Return the largest of some numbers. */
EXPORT uint64_t megascan_top(const uint64_t *values, const int64_t *rows, int64_t num_rows) {
    uint64_t top = 0;
    for (int64_t row = 0; row < num_rows; row++)
        if (values[rows[row]] > top) top = values[rows[row]];
    return top;
}

/* Write messages of the same parts: what they share, and over it each column's number. The i-th
   stands at place[i], or behind the one before it where there are no places. */
EXPORT void megascan_pack(const Column *columns, int64_t num_columns, const uint8_t *shared,
                          int64_t width, int64_t num_messages, const int64_t *place, uint8_t *out) {
    for (int64_t row = 0; row < num_messages; row++) {
        uint8_t *message = out + (place ? place[row] : row * width);
        memcpy(message, shared, (size_t)width);
        for (const Column *column = columns; column < columns + num_columns; column++) {
            uint64_t value = column->values[column->rows ? column->rows[row] : row];
            uint8_t *at = message + column->at, *last = at + column->width - 1;
            if (column->kind == FIXED64) {
                memcpy(at, &value, sizeof value);
                continue;
            }
            for (; at < last; value >>= 7) *at++ = (uint8_t)(value | 0x80);
            *at = (uint8_t)(value & 0x7F);
        }
    }
}
