/* Products of few rows with a weight of 4 or 8 bits, whose columns share scales in groups.
 *
 *     y[t, n] = sum over g of  scale[n, g] * (codes[n, g] . x[t, g]) + offset[n, g] * sum x[t, g]
 *
 * Such a product waits for the weight, so its codes are read once, as they are. Rows of x, normed
 * if told to, are rounded to 16 bits, with a scale for each row and group, in two bytes: high and
 * low. Each is multiplied with the codes by VNNI, 4 columns of 16 rows of the weight an
 * instruction, and summed exactly in 32 bits over a group; what groups give is summed in float32.
 * (llama.cpp's products round x to 8 bits; over a text that costs three times the divergence of all
 * else.)
 *
 *     codes      uint8 [panels, columns / 4, 16, 4], a panel being 16 rows of the weight; of 4 bits
 *                two steps of 4 columns share 64 bytes: the first in the low halves
 *     factors    float16 [panels, groups, 2, 16]: scales, and offsets + 2^(bits - 1) * scales,
 *                which are small
 *     rounded x  int8 [rows, 2, columns]; then float32 [rows, groups, 2]: scale, sum
 */

#include "cpu_vectors.h"

#define PANEL 16
#define LARGEST_GROUP 256
#define PARALLEL_ROWS 16 /* from which on several threads round them */
#define LEAST_SCALE 1e-36f /* whose inverse is a number */

struct weight {
    const uint8_t *codes;
    const uint16_t *factors;
    int32_t panels, columns, group, bits;
};

struct rows {
    const void *x;     /* [count, columns] */
    const float *norm; /* [columns]: x is normed with it, or none */
    int8_t *rounded;   /* scratch for what is said above */
    float eps;
    int32_t count, type;
};

enum { NO_GATE, SILU, GELU_TANH };

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)

#include <immintrin.h>

int zlm_has_products(void) { return 1; }

/* Rounds a row to 16 bits; see above. */
static void round_row(const struct rows *rows, const struct weight *weight, int row,
                      float *scales) {
    const int columns = weight->columns, group = weight->group;
    const int64_t first = (int64_t)row * columns;
    int8_t *high = rows->rounded + 2 * first, *low = high + columns;
    float factor = 1.0f;
    if (rows->norm) factor = norm_factor(rows->x, first, columns, rows->eps, rows->type);
    for (int at = 0; at < columns; at += group, scales += 2) {
        floats most = {0}, zeros = {0}, values[LARGEST_GROUP / LANES];
        for (int i = 0; i < group; i += LANES) {
            floats x = load(rows->x, first + at + i, rows->type);
            if (rows->norm) x = x * factor * load(rows->norm, at + i, FLOAT32);
            values[i / LANES] = x;
            most = larger(larger(x, -x), most);
            zeros += x * 0.0f;
        }
        float scale = largest(most) / (127.0f * 256.0f);
        const float inverse = scale > LEAST_SCALE ? 1.0f / scale : 0.0f;
        scale = (scale > LEAST_SCALE ? scale : 0.0f) + sum(zeros); /* NaN, if an x is no number */
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < group; i += LANES) {
            __m512i q = _mm512_cvtps_epi32((__m512)(values[i / LANES] * inverse));
            __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
            __m512i lower = _mm512_sub_epi32(q, _mm512_slli_epi32(upper, 8));
            total = _mm512_add_epi32(total, q);
            _mm_storeu_si128((__m128i *)(high + at + i), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128((__m128i *)(low + at + i), _mm512_cvtepi32_epi8(lower));
        }
        scales[0] = scale;
        scales[1] = scale * sum((floats)_mm512_cvtepi32_ps(total));
    }
}

INLINE __m512i four(const int8_t *x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm512_set1_epi32(bytes);
}

/* Writes the products of ROWS rows with one panel. */
INLINE void multiply(const struct weight *weight, int panel, const int8_t *x, const float *scales,
                     __m512 *totals, const int ROWS, const int BITS) {
    const int columns = weight->columns, group = weight->group, groups = columns / group;
    const uint8_t *codes = weight->codes + (int64_t)panel * columns * PANEL * BITS / 8;
    const uint16_t *factors = weight->factors + (int64_t)panel * groups * 2 * PANEL;
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int r = 0; r < ROWS; r++) totals[r] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, factors += 2 * PANEL) {
        __m512i high[TILE], low[TILE];
        for (int r = 0; r < ROWS; r++) high[r] = low[r] = _mm512_setzero_si512();
        for (int k = g * group; k < (g + 1) * group; k += 8, codes += 16 * BITS) {
            __m512i first = _mm512_loadu_si512(codes), second;
            if (BITS == 4) {
                second = _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble);
                first = _mm512_and_si512(first, nibble);
            } else {
                second = _mm512_loadu_si512(codes + 64);
            }
            for (int r = 0; r < ROWS; r++) {
                const int8_t *upper = x + 2 * (int64_t)r * columns + k, *lower = upper + columns;
                high[r] = _mm512_dpbusd_epi32(high[r], first, four(upper));
                low[r] = _mm512_dpbusd_epi32(low[r], first, four(lower));
                high[r] = _mm512_dpbusd_epi32(high[r], second, four(upper + 4));
                low[r] = _mm512_dpbusd_epi32(low[r], second, four(lower + 4));
            }
        }
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)factors));
        const __m512 rest = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)factors + 1));
        const __m512 offset = _mm512_fnmadd_ps(_mm512_set1_ps(1 << (BITS - 1)), scale, rest);
        for (int r = 0; r < ROWS; r++) {
            const float *own = scales + 2 * (int64_t)(r * groups + g);
            __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
            __m512 scaled = _mm512_mul_ps(scale, _mm512_set1_ps(own[0]));
            totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scaled, totals[r]);
            totals[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(own[1]), totals[r]);
        }
    }
}

INLINE void multiply_rows(const struct weight *weight, int panel, const int8_t *x,
                          const float *scales, __m512 *totals, int rows, const int BITS) {
    switch (rows) {
    case 1: multiply(weight, panel, x, scales, totals, 1, BITS); break;
    case 2: multiply(weight, panel, x, scales, totals, 2, BITS); break;
    case 3: multiply(weight, panel, x, scales, totals, 3, BITS); break;
    default: multiply(weight, panel, x, scales, totals, 4, BITS);
    }
}

INLINE floats activate(floats x, int gate) {
    if (gate == SILU) return x / (1.0f + exponential(-x));
    /* x / 2 (1 + tanh z) = x / (1 + e^-2z) */
    return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
}

/* y [count, panels * PANEL], or with `residual`, y + the product; with `gate`, [count, half of it]:
 * what it makes of the first half of the product's columns, times the second half. */
void zlm_product(const struct weight *weight, const struct rows *rows, const void *bias, void *y,
                 const void *residual, int gate, int type) {
    const int groups = weight->columns / weight->group;
    const int panels = gate == NO_GATE ? weight->panels : weight->panels / 2;
    const int64_t width = (int64_t)panels * PANEL;
    float *scales = (float *)(rows->rounded + 2 * (int64_t)rows->count * weight->columns);
#pragma omp parallel for schedule(static) if (rows->count >= PARALLEL_ROWS)
    for (int row = 0; row < rows->count; row++)
        round_row(rows, weight, row, scales + 2 * (int64_t)row * groups);
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < panels; panel++) {
        for (int row = 0; row < rows->count; row += TILE) {
            const int count = rows->count - row < TILE ? rows->count - row : TILE;
            const int8_t *x = rows->rounded + 2 * (int64_t)row * weight->columns;
            const float *own = scales + 2 * (int64_t)row * groups;
            __m512 totals[2][TILE];
            for (int half = 0; half < (gate == NO_GATE ? 1 : 2); half++) {
                const int at = panel + half * panels;
                if (weight->bits == 4)
                    multiply_rows(weight, at, x, own, totals[half], count, 4);
                else
                    multiply_rows(weight, at, x, own, totals[half], count, 8);
                for (int r = 0; bias && r < count; r++)
                    totals[half][r] += (__m512)load(bias, (int64_t)at * PANEL, FLOAT32);
            }
            for (int r = 0; r < count; r++) {
                const int64_t to = (row + r) * width + (int64_t)panel * PANEL;
                floats out = (floats)totals[0][r];
                if (gate != NO_GATE) out = activate(out, gate) * (floats)totals[1][r];
                if (residual) out += load(residual, to, type);
                store(y, to, out, type);
            }
        }
    }
}

#else

int zlm_has_products(void) { return 0; }

void zlm_product(const struct weight *weight, const struct rows *rows, const void *bias, void *y,
                 const void *residual, int gate, int type) {
    (void)weight, (void)rows, (void)bias, (void)y, (void)residual, (void)gate, (void)type;
}

#endif
