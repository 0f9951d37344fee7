/* What a decoder layer computes around its matrix products, each in one pass over memory.
 *
 * Compiled for one element type: float, or with -DBFLOAT16 bfloat16, which is computed in float and rounded once. Rows are
 * tokens, their sizes multiples of 16 elements. Values that are not finite stay so: nothing is compiled with -ffast-math.
 *
 * Functions that return int return 0, or OUT_OF_MEMORY, or OUT_OF_BOUNDS for a slot or block that the pool does not have.
 */

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __AVX__
#error "this processor has no vectors of 256 bits, without which PyTorch's own operations are faster"
#endif
#if defined(BFLOAT16) && defined(__AVX512BF16__)
#include <immintrin.h>
#define PAIRS /* products of two bfloat16 at once, summed in float */
typedef uint16_t Shorts __attribute__((vector_size(64), aligned(2), may_alias));
#endif

#define OUT_OF_MEMORY 1
#define OUT_OF_BOUNDS 2

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
typedef float Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

#ifdef BFLOAT16
typedef uint16_t Element;
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2), aligned(2), may_alias));

static inline Vector load(const Element *at) {
    return (Vector)(__builtin_convertvector(*(const Halves *)at, Words) << 16);
}

static inline void store(Element *at, Vector value) { /* to the nearest, ties to even; a NaN stays one */
    Words bits = (Words)value;
    Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    Words broken = (Words)(value != value);
    *(Halves *)at = __builtin_convertvector((rounded & ~broken) | (0x7FC0 & broken), Halves);
}
#else
typedef float Element;

static inline Vector load(const Element *at) { return *(const Unaligned *)at; }

static inline void store(Element *at, Vector value) { *(Unaligned *)at = value; }
#endif

static inline Vector load_float(const float *at) { return *(const Unaligned *)at; }

static inline Vector choose(Integers where, Vector yes, Vector no) {
    return (Vector)(((Integers)yes & where) | ((Integers)no & ~where));
}

/* e to the x, for x up to 88: 2 to the nearest whole number of x / ln 2, times a polynomial of the rest (minimax, 1e-7). */
static inline Vector exponential(Vector x) {
    x = choose(x < -87.0f, (Vector){} - 87.0f, x);
    const float magic = 12582912.0f; /* 1.5 · 2^23: what is added to it is rounded to a whole number */
    Vector shifted = x * 1.44269504f + magic;
    Vector rest = x * 1.44269504f - (shifted - magic);
    rest += x * 1.925963033e-8f; /* what 1.44269504 leaves out */
    Vector p = rest * 1.5345593533e-4f + 1.3399929442e-3f;
    p = p * rest + 9.6184897692e-3f;
    p = p * rest + 5.5503287825e-2f;
    p = p * rest + 2.4022646883e-1f;
    p = p * rest + 6.9314720573e-1f;
    p = p * rest + 1.0f;
    Integers power = ((Integers)shifted << 23) + 0x3F800000;
    return p * (Vector)power;
}

static inline Vector larger(Vector a, Vector b) { return choose(a > b, a, b); }

/* Item i becomes that of i + distance, in a ring. */
#if WIDTH == 16
#define TURNED(x, n)                                                                                                      \
    __builtin_shuffle(x, (Integers){(0 + n) % 16, (1 + n) % 16, (2 + n) % 16, (3 + n) % 16, (4 + n) % 16, (5 + n) % 16,   \
                                    (6 + n) % 16, (7 + n) % 16, (8 + n) % 16, (9 + n) % 16, (10 + n) % 16, (11 + n) % 16, \
                                    (12 + n) % 16, (13 + n) % 16, (14 + n) % 16, (15 + n) % 16})
#else
#define TURNED(x, n)                                                                                                    \
    __builtin_shuffle(x, (Integers){(0 + n) % 8, (1 + n) % 8, (2 + n) % 8, (3 + n) % 8, (4 + n) % 8, (5 + n) % 8,       \
                                    (6 + n) % 8, (7 + n) % 8})
#endif

static inline float total(Vector x) {
#if WIDTH == 16
    x += TURNED(x, 8);
#endif
    x += TURNED(x, 4);
    x += TURNED(x, 2);
    return x[0] + x[1];
}

static inline float greatest(Vector x) {
#if WIDTH == 16
    x = larger(x, TURNED(x, 8));
#endif
    x = larger(x, TURNED(x, 4));
    x = larger(x, TURNED(x, 2));
    return x[0] > x[1] ? x[0] : x[1];
}

/* 1 / sqrt(mean(x²) + eps) of a row */
static inline float inverse_rms(const Element *row, int64_t size, float eps) {
    Vector squares = {}, more = {};
    for (int64_t i = 0; i < size; i += 16) {
        Vector a = load(row + i);
        squares += a * a;
#if WIDTH == 8
        Vector b = load(row + i + 8);
        more += b * b;
#endif
    }
    return 1.0f / __builtin_sqrtf(total(squares + more) / (float)size + eps);
}

/* scale [size], of floats where wide is set, else of elements */
static inline Vector scale_at(const void *scale, int wide, int64_t i) {
    return wide ? load_float((const float *)scale + i) : load((const Element *)scale + i);
}

static inline void scaled(Element *out, const Element *row, const void *scale, int wide, float factor, int64_t size) {
    for (int64_t i = 0; i < size; i += WIDTH) store(out + i, load(row + i) * factor * scale_at(scale, wide, i));
}

/* RMS norm of each row of x [rows, size]. */
void norm(Element *out, const Element *x, const void *scale, int wide, float eps, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        scaled(out + row * size, x + row * size, scale, wide, inverse_rms(x + row * size, size, eps), size);
}

/* x becomes x + residual, and out its norm. */
void add_norm(Element *out, Element *x, const Element *residual, const void *scale, int wide, float eps, int64_t rows,
              int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        Element *sum = x + row * size;
        for (int64_t i = 0; i < size; i += WIDTH) store(sum + i, load(sum + i) + load(residual + row * size + i));
        scaled(out + row * size, sum, scale, wide, inverse_rms(sum, size, eps), size);
    }
}

/* silu(gate) · up of gate_up [rows, 2 · size]; out [rows, size]. */
void silu_mul(Element *out, const Element *gate_up, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const Element *gate = gate_up + row * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += WIDTH) {
            Vector x = load(gate + i), y = x / (1.0f + exponential(-x));
            store(out + row * size + i, choose(x < -88.0f, x * 0.0f, y) * load(up + i)); /* 0 to all digits there */
        }
    }
}

/* Norm (unless scale is null) and rotate a head; its halves are the pairs. */
static inline void rotate(Element *head, const Element *cosine, const Element *sine, const void *scale, int wide, float eps,
                          int64_t dim) {
    int64_t half = dim / 2;
    float factor = scale ? inverse_rms(head, dim, eps) : 1.0f;
    for (int64_t i = 0; i < half; i += WIDTH) {
        Vector a = load(head + i), b = load(head + half + i);
        if (scale) {
            a *= factor * scale_at(scale, wide, i);
            b *= factor * scale_at(scale, wide, half + i);
        }
        store(head + i, a * load(cosine + i) - b * load(sine + i));
        store(head + half + i, b * load(cosine + half + i) + a * load(sine + half + i));
    }
}

/* Norm and rotate query and key in place, and write key and value to their slots of a pool.
 * qkv [tokens, (heads + 2 · kv_heads) · dim]; cosine, sine [tokens, dim]; keys, values [pool_slots, kv_heads, dim]; slots [tokens];
 * query_scale, key_scale [dim] or null. */
int rope_write(Element *qkv, const Element *cosine, const Element *sine, const void *query_scale, const void *key_scale,
               int wide, float eps, Element *keys, Element *values, const int64_t *slots, int64_t pool_slots, int64_t tokens,
               int64_t heads, int64_t kv_heads, int64_t dim, int threads) {
    int64_t width = kv_heads * dim;
    for (int64_t token = 0; token < tokens; token++)
        if (slots[token] < 0 || slots[token] >= pool_slots) return OUT_OF_BOUNDS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < tokens; token++) {
        Element *row = qkv + token * (heads + 2 * kv_heads) * dim, *key = row + heads * dim;
        const Element *c = cosine + token * dim, *s = sine + token * dim;
        for (int64_t head = 0; head < heads; head++) rotate(row + head * dim, c, s, query_scale, wide, eps, dim);
        for (int64_t head = 0; head < kv_heads; head++) rotate(key + head * dim, c, s, key_scale, wide, eps, dim);
        memcpy(keys + slots[token] * width, key, width * sizeof(Element));
        memcpy(values + slots[token] * width, key + width, width * sizeof(Element));
    }
    return 0;
}

/* ---- attention ---- */

#define TILE 64 /* tokens of context that are packed together: a multiple of WIDTH */
#define MOST_DIM 256
#define MOST_LANES 64
#define BLOCK 8 /* lanes that one pass over a tile serves */

#define INLINE static inline __attribute__((always_inline)) /* so that sizes that are constants become some */

/* What attend takes of a layer. key_dim, value_dim: multiples of 32, at most 256. window: tokens back that a token sees,
 * itself included; 0 for all. softcap: 0 for none. sinks [heads] or null. query_stride: elements from token to token. */
typedef struct {
    const Element *query, *keys, *values;
    const float *sinks;
    Element *out;
    int64_t query_stride, heads, kv_heads, key_dim, value_dim, window;
    float scale, softcap;
} Layer;

/* And of a step: sequences with fresh tokens each, end to end, the last of which sees context positions, itself included;
 * table [sequences, blocks], of a pool of pool_blocks. */
typedef struct {
    const int64_t *fresh, *context, *table;
    int64_t sequences, blocks, block_size, pool_blocks;
} Step;

/* One piece of work: lanes first, first + 1, … of a sequence and KV head. Lane l is head l % group of new token l / group. */
typedef struct {
    int64_t sequence, token, kv_head, first;
    int count;
} Piece;

/* A factor of a product: a float, or a pair of bfloat16 that are next to each other in the sum. */
#ifdef PAIRS
#define IN_A_FACTOR 2
#else
#define IN_A_FACTOR 1
#endif
#define MOST_FACTORS (MOST_DIM / IN_A_FACTOR)

static inline Vector multiply_add(Vector sum, Vector factors, const float *other) {
#ifdef PAIRS
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)factors, (__m512bh)_mm512_set1_ps(*other));
#else
    return sum + factors * *other;
#endif
}

/* The factors of WIDTH · IN_A_FACTOR elements of a row. */
static inline Vector factors_of(const Element *at) {
#ifdef PAIRS
    return (Vector) * (const Shorts *)at;
#else
    return load(at);
#endif
}

/* Rows become columns: 32-bit items of WIDTH vectors. */
static inline void transpose(Vector *x) {
    Vector y[WIDTH];
#if WIDTH == 16
    for (int i = 0; i < 16; i += 2) {
        y[i] = __builtin_shuffle(x[i], x[i + 1], (Integers){0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29});
        y[i + 1] = __builtin_shuffle(x[i], x[i + 1], (Integers){2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            Vector a = y[i + j], b = y[i + 2 + j];
            x[i + 2 * j] = __builtin_shuffle(a, b, (Integers){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29});
            x[i + 2 * j + 1] = __builtin_shuffle(a, b, (Integers){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            Vector a = x[i + j], b = x[i + 4 + j];
            y[i + j] = __builtin_shuffle(a, b, (Integers){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27});
            y[i + 4 + j] = __builtin_shuffle(a, b, (Integers){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
        }
    for (int j = 0; j < 8; j++) {
        Vector a = y[j], b = y[8 + j];
        x[j] = __builtin_shuffle(a, b, (Integers){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
        x[8 + j] = __builtin_shuffle(a, b, (Integers){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    }
#else
    for (int i = 0; i < 8; i += 2) {
        y[i] = __builtin_shuffle(x[i], x[i + 1], (Integers){0, 8, 1, 9, 4, 12, 5, 13});
        y[i + 1] = __builtin_shuffle(x[i], x[i + 1], (Integers){2, 10, 3, 11, 6, 14, 7, 15});
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            Vector a = y[i + j], b = y[i + 2 + j];
            x[i + 2 * j] = __builtin_shuffle(a, b, (Integers){0, 1, 8, 9, 4, 5, 12, 13});
            x[i + 2 * j + 1] = __builtin_shuffle(a, b, (Integers){2, 3, 10, 11, 6, 7, 14, 15});
        }
    for (int j = 0; j < 4; j++) {
        Vector a = x[j], b = x[4 + j];
        y[j] = __builtin_shuffle(a, b, (Integers){0, 1, 2, 3, 8, 9, 10, 11});
        y[4 + j] = __builtin_shuffle(a, b, (Integers){4, 5, 6, 7, 12, 13, 14, 15});
    }
    memcpy(x, y, sizeof(y));
#endif
}

/* A tile of context, laid out for the products: keys by factor and then token, values by pair of tokens (or token) and then
 * dimension. */
typedef struct {
    float keys[MOST_FACTORS * TILE] __attribute__((aligned(64)));
    float values[TILE / IN_A_FACTOR * MOST_DIM] __attribute__((aligned(64)));
} Tile;

/* The lanes of a piece. */
typedef struct {
    float query[MOST_LANES][MOST_FACTORS] __attribute__((aligned(64)));
    float acc[MOST_LANES][MOST_DIM] __attribute__((aligned(64))); /* values times their weights, summed */
    float row_max[MOST_LANES], row_sum[MOST_LANES];               /* highest score, and the sum of weights */
    int64_t ends[MOST_LANES];                                     /* context of each */
} Lanes;

/* Pack the first groups · WIDTH of slots; key_row, value_row: elements from slot to slot. */
INLINE void pack_tile(Tile *tile, const Element *keys, const Element *values, int64_t key_row, int64_t value_row,
                      const int64_t *slots, int64_t groups, const int64_t key_dim, const int64_t value_dim) {
    for (int64_t group = 0; group < groups; group++)
        for (int64_t d = 0; d < key_dim; d += WIDTH * IN_A_FACTOR) {
            Vector square[WIDTH];
            for (int i = 0; i < WIDTH; i++) square[i] = factors_of(keys + slots[group * WIDTH + i] * key_row + d);
            transpose(square);
            for (int i = 0; i < WIDTH; i++)
                *(Vector *)(tile->keys + (d / IN_A_FACTOR + i) * TILE + group * WIDTH) = square[i];
        }
    for (int64_t token = 0; token < groups * WIDTH; token += IN_A_FACTOR) {
        float *to = tile->values + token / IN_A_FACTOR * value_dim;
        const Element *row = values + slots[token] * value_row;
#ifdef PAIRS
        const Element *next = values + slots[token + 1] * value_row;
        for (int64_t d = 0; d < value_dim; d += 2 * WIDTH) {
            Shorts a = *(const Shorts *)(row + d), b = *(const Shorts *)(next + d);
            *(Shorts *)(to + d) = __builtin_shuffle(a, b, (Shorts){0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40,
                                                                   9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47});
            *(Shorts *)(to + d + WIDTH) =
                __builtin_shuffle(a, b, (Shorts){16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                                 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63});
        }
#else
        for (int64_t d = 0; d < value_dim; d += WIDTH) *(Vector *)(to + d) = load(row + d);
#endif
    }
}

/* The queries of LANES lanes, from lane at on, over the groups · WIDTH tokens of a tile that begins at position begin. The
 * softmax is online (Milakov and Gimelshein 2018), in tiles as in FlashAttention (Dao et al. 2022). */
INLINE void attend_tile(const Layer *layer, const Tile *tile, Lanes *lanes, int at, int64_t begin, int64_t groups,
                        const int LANES, const int64_t key_dim, const int64_t value_dim) {
    float score[BLOCK][TILE] __attribute__((aligned(64)));
    const int64_t factors = key_dim / IN_A_FACTOR, tokens = groups * WIDTH;
    Integers count;
    for (int i = 0; i < WIDTH; i++) count[i] = i;
    for (int64_t group = 0; group < groups; group += 2) { /* of an odd number the last is computed for nothing */
        Vector low[BLOCK], high[BLOCK];
        for (int lane = 0; lane < LANES; lane++) low[lane] = high[lane] = (Vector){};
        const float *keys = tile->keys + group * WIDTH;
        for (int64_t factor = 0; factor < factors; factor++) {
            Vector a = *(const Vector *)(keys + factor * TILE), b = *(const Vector *)(keys + factor * TILE + WIDTH);
            for (int lane = 0; lane < LANES; lane++) {
                low[lane] = multiply_add(low[lane], a, &lanes->query[at + lane][factor]);
                high[lane] = multiply_add(high[lane], b, &lanes->query[at + lane][factor]);
            }
        }
        for (int lane = 0; lane < LANES; lane++) {
            *(Vector *)(score[lane] + group * WIDTH) = low[lane];
            *(Vector *)(score[lane] + (group + 1) * WIDTH) = high[lane];
        }
    }
    float before[WIDTH] __attribute__((aligned(64))) = {0}, now[WIDTH] __attribute__((aligned(64))) = {0};
    float shrink[WIDTH] __attribute__((aligned(64)));
    int edge[BLOCK];
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t end = lanes->ends[at + lane];
        edge[lane] = begin + tokens > end || (layer->window && begin < end - layer->window);
        Vector top = (Vector){} - __builtin_inff();
        for (int64_t i = 0; i < tokens; i += WIDTH) {
            Vector x = *(Vector *)(score[lane] + i) * layer->scale;
            if (layer->softcap > 0) { /* · tanh, which is 1 from 44 on */
                x *= 2.0f / layer->softcap;
                x = layer->softcap * (1.0f - 2.0f / (exponential(choose(x > 88.0f, (Vector){} + 88.0f, x)) + 1.0f));
            }
            if (edge[lane]) {
                Integers place = count + (int32_t)(begin + i), hidden = place >= (int32_t)end;
                if (layer->window) hidden |= place < (int32_t)(end - layer->window);
                x = choose(hidden, (Vector){} - __builtin_inff(), x);
            }
            top = larger(x, top);
            *(Vector *)(score[lane] + i) = x;
        }
        const float found = greatest(top);
        before[lane] = lanes->row_max[at + lane];
        now[lane] = found > before[lane] ? found : before[lane];
    }
    const Vector none = (Vector){} - __builtin_inff(), was = *(Vector *)before, is = *(Vector *)now;
    const Vector shift = choose(is == none, (Vector){}, is); /* not -inf, where nothing has been seen yet */
    *(Vector *)shrink = choose(was == none, (Vector){}, exponential(was - shift));
    for (int lane = 0; lane < LANES; lane++) {
        const float top = shift[lane];
        Vector added = {};
        for (int64_t i = 0; i < tokens; i += WIDTH) {
            Vector x = *(Vector *)(score[lane] + i);
            Vector weight = exponential(x - top);
            weight = choose(x == none, (Vector){}, weight);
            added += weight;
#ifdef PAIRS
            *(__m256bh *)((Element *)score[lane] + i) = _mm512_cvtneps_pbh((__m512)weight);
#else
            *(Vector *)(score[lane] + i) = weight;
#endif
        }
        lanes->row_sum[at + lane] = lanes->row_sum[at + lane] * shrink[lane] + total(added);
        lanes->row_max[at + lane] = now[lane];
    }
    for (int64_t d = 0; d < value_dim; d += 2 * WIDTH) {
        Vector low[BLOCK], high[BLOCK];
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = *(Vector *)(lanes->acc[at + lane] + d) * shrink[lane];
            high[lane] = *(Vector *)(lanes->acc[at + lane] + d + WIDTH) * shrink[lane];
        }
        const float *values = tile->values + d;
        for (int64_t i = 0; i < tokens / IN_A_FACTOR; i++) {
            Vector a = *(const Vector *)(values + i * value_dim), b = *(const Vector *)(values + i * value_dim + WIDTH);
            for (int lane = 0; lane < LANES; lane++) {
                low[lane] = multiply_add(low[lane], a, score[lane] + i);
                high[lane] = multiply_add(high[lane], b, score[lane] + i);
            }
        }
        for (int lane = 0; lane < LANES; lane++) {
            *(Vector *)(lanes->acc[at + lane] + d) = low[lane];
            *(Vector *)(lanes->acc[at + lane] + d + WIDTH) = high[lane];
        }
    }
}

/* What a thread works in. */
typedef struct {
    Tile tile;
    Lanes lanes;
} Space;

INLINE void attend_piece(const Layer *layer, const Step *step, const Piece *piece, Space *space, const int64_t key_dim,
                         const int64_t value_dim) {
    const int64_t group = layer->heads / layer->kv_heads, size = step->block_size;
    const int64_t first_end = step->context[piece->sequence] - step->fresh[piece->sequence] + 1;
    const int64_t *table = step->table + piece->sequence * step->blocks;
    const int64_t key_row = layer->kv_heads * key_dim, value_row = layer->kv_heads * value_dim;
    const Element *keys = layer->keys + piece->kv_head * key_dim, *values = layer->values + piece->kv_head * value_dim;
    Tile *tile = &space->tile;
    Lanes *lanes = &space->lanes;
    const int count = piece->count, held = count < 3 ? count : count < 5 ? 4 : (count + BLOCK - 1) / BLOCK * BLOCK;
    for (int lane = 0; lane < held; lane++) {
        const int64_t at = piece->first + (lane < count ? lane : count - 1); /* lanes over repeat the last, for nothing */
        const int64_t token = at / group, head = piece->kv_head * group + at % group;
        const Element *query = layer->query + (piece->token + token) * layer->query_stride + head * key_dim;
        for (int64_t d = 0; d < key_dim; d += WIDTH * IN_A_FACTOR)
            *(Vector *)(lanes->query[lane] + d / IN_A_FACTOR) = factors_of(query + d);
        memset(lanes->acc[lane], 0, value_dim * sizeof(float));
        lanes->row_max[lane] = layer->sinks ? layer->sinks[head] : -__builtin_inff();
        lanes->row_sum[lane] = layer->sinks ? 1.0f : 0.0f;
        lanes->ends[lane] = first_end + token;
    }
    const int64_t end = lanes->ends[held - 1];
    int64_t begin = layer->window ? lanes->ends[0] - layer->window : 0;
    int64_t slots[TILE];
    /* from a whole tile on, so that a token is computed alike whoever shares its piece */
    for (begin = begin < 0 ? 0 : begin / TILE * TILE; begin < end; begin += TILE) {
        const int64_t tokens = end - begin < TILE ? end - begin : TILE, groups = (tokens + WIDTH - 1) / WIDTH;
        int64_t block = begin / size, offset = begin % size;
        for (int64_t i = 0; i < tokens; i++) {
            slots[i] = table[block] * size + offset;
            if (++offset == size) offset = 0, block++;
        }
        for (int64_t i = tokens; i < groups * WIDTH; i++) slots[i] = slots[tokens - 1];
        pack_tile(tile, keys, values, key_row, value_row, slots, groups, key_dim, value_dim);
        if (held >= BLOCK) {
            for (int at = 0; at < held; at += BLOCK) {
                if (lanes->ends[at + BLOCK - 1] <= begin) continue;
                if (layer->window && lanes->ends[at] - layer->window >= begin + tokens) continue;
                attend_tile(layer, tile, lanes, at, begin, groups, BLOCK, key_dim, value_dim);
            }
        } else if (held == 4) {
            attend_tile(layer, tile, lanes, 0, begin, groups, 4, key_dim, value_dim);
        } else if (held == 2) {
            attend_tile(layer, tile, lanes, 0, begin, groups, 2, key_dim, value_dim);
        } else {
            attend_tile(layer, tile, lanes, 0, begin, groups, 1, key_dim, value_dim);
        }
    }
    for (int lane = 0; lane < count; lane++) {
        const int64_t at = piece->first + lane, head = piece->kv_head * group + at % group;
        Element *out = layer->out + ((piece->token + at / group) * layer->heads + head) * value_dim;
        for (int64_t d = 0; d < value_dim; d += WIDTH) store(out + d, *(Vector *)(lanes->acc[lane] + d) / lanes->row_sum[lane]);
    }
}

static void attend_any(const Layer *layer, const Step *step, const Piece *piece, Space *space) {
    if (layer->key_dim == 64 && layer->value_dim == 64)
        attend_piece(layer, step, piece, space, 64, 64);
    else if (layer->key_dim == 128 && layer->value_dim == 128)
        attend_piece(layer, step, piece, space, 128, 128);
    else
        attend_piece(layer, step, piece, space, layer->key_dim, layer->value_dim);
}

/* Causal attention of every new token of a step over the blocks of its sequence, which hold it already.
 * out [tokens, heads, value_dim]; keys [slots, kv_heads, key_dim], values likewise. */
int attend(const Layer *layer, const Step *step, int threads) {
    const int64_t group = layer->heads / layer->kv_heads;
    int64_t count = 0;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t used = (step->context[s] + step->block_size - 1) / step->block_size;
        if (step->fresh[s] < 0 || step->context[s] < step->fresh[s] || used > step->blocks) return OUT_OF_BOUNDS;
        for (int64_t i = 0; i < used; i++) {
            const int64_t block = step->table[s * step->blocks + i];
            if (block < 0 || block >= step->pool_blocks) return OUT_OF_BOUNDS;
        }
        count += (step->fresh[s] * group + MOST_LANES - 1) / MOST_LANES * layer->kv_heads;
    }
    if (!count) return 0;
    if (threads > count) threads = (int)count;
    Piece *pieces = malloc((size_t)count * sizeof(Piece));
    Space *spaces = aligned_alloc(64, (size_t)threads * sizeof(Space)); /* not on stacks, which may be small */
    if (!pieces || !spaces) {
        free(pieces);
        free(spaces);
        return OUT_OF_MEMORY;
    }
    int64_t at = 0, token = 0;
    for (int64_t s = 0; s < step->sequences; s++) {
        const int64_t lanes = step->fresh[s] * group;
        for (int64_t head = 0; head < layer->kv_heads; head++)
            for (int64_t first = 0; first < lanes; first += MOST_LANES)
                pieces[at++] = (Piece){s, token, head, first, (int)(lanes - first < MOST_LANES ? lanes - first : MOST_LANES)};
        token += step->fresh[s];
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t i = 0; i < count; i++) attend_any(layer, step, pieces + i, spaces + omp_get_thread_num());
    free(pieces);
    free(spaces);
    return 0;
}
