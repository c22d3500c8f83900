/* LANES numbers at a time, in the compiler's own vectors: AVX-512, AVX2 or NEON as it finds. */

#ifndef ZLM_CPU_VECTORS_H
#define ZLM_CPU_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define TILE 4 /* of what goes over the same data together: what registers hold */
#else
#define LANES 8
#define TILE 2
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (i32x4){__VA_ARGS__})
#endif

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

enum { FLOAT32, BFLOAT16 }; /* types of what pointers point at, which the callers know */

INLINE floats splat(float value) { return value - (floats){0}; }

/* Returns LANES numbers of p from element i on, of any alignment. */
INLINE floats load(const void *p, int64_t i, int type) {
    if (type == FLOAT32) {
        floats values;
        memcpy(&values, (const float *)p + i, sizeof values);
        return values;
    }
    halves upper;
    memcpy(&upper, (const uint16_t *)p + i, sizeof upper);
    return (floats)(__builtin_convertvector(upper, words) << 16);
}

/* Stores LANES numbers, rounded to the nearest, ties to even. */
INLINE void store(void *p, int64_t i, floats values, int type) {
    if (type == FLOAT32) {
        memcpy((float *)p + i, &values, sizeof values);
        return;
    }
    words bits = (words)values;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_number = (words)(values == values);
    rounded = (rounded & is_number) | (0x7fc0 & ~is_number);
    halves upper = __builtin_convertvector(rounded, halves);
    memcpy((uint16_t *)p + i, &upper, sizeof upper);
}

/* Returns a where the mask is set, else b. */
INLINE floats choose(ints mask, floats a, floats b) {
    return (floats)(((ints)a & mask) | ((ints)b & ~mask));
}

INLINE floats larger(floats a, floats b) { return choose(a > b, a, b); }

INLINE f32x4 fold(floats v) {
    f32x8 eights[LANES / 8];
    memcpy(eights, &v, sizeof v);
    f32x8 eight = LANES == 8 ? eights[0] : eights[0] + eights[LANES / 8 - 1];
    f32x4 fours[2];
    memcpy(fours, &eight, sizeof eight);
    return fours[0] + fours[1];
}

/* Returns the sums of a, b, c and d. */
INLINE f32x4 sums(floats a, floats b, floats c, floats d) {
    f32x4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
    f32x4 ab = SHUFFLE4(a4, b4, 0, 1, 4, 5) + SHUFFLE4(a4, b4, 2, 3, 6, 7);
    f32x4 cd = SHUFFLE4(c4, d4, 0, 1, 4, 5) + SHUFFLE4(c4, d4, 2, 3, 6, 7);
    return SHUFFLE4(ab, cd, 0, 2, 4, 6) + SHUFFLE4(ab, cd, 1, 3, 5, 7);
}

INLINE float sum(floats v) {
    f32x4 four = fold(v);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Returns 1 / sqrt(mean(x^2) + eps) of the `size` numbers of x from element `first` on. */
INLINE float norm_factor(const void *x, int64_t first, int size, float eps, int type) {
    floats squares = {0};
    for (int i = 0; i < size; i += LANES) {
        floats values = load(x, first + i, type);
        squares += values * values;
    }
    return 1.0f / sqrtf(sum(squares) / size + eps);
}

INLINE float largest(floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x to 2 units in the last place, for x brought into -87 .. 88; NaN stays.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes' expf (S. Moshier). */
INLINE floats exponential(floats x) {
    x = choose(x < -87.0f, splat(-87.0f), choose(x > 88.0f, splat(88.0f), x));
    floats shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    floats n = shifted - 12582912.0f;
    floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    ints exponent = ((ints)shifted - 0x4b400000 + 127) << 23;
    return p * (floats)exponent;
}

#endif
