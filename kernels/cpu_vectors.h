/* Sixteen numbers at a time, in the compiler's own vectors: AVX-512, AVX2 or NEON as it finds. */

#ifndef ZLM_CPU_VECTORS_H
#define ZLM_CPU_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE4(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, (i32x4){__VA_ARGS__})
#endif

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

enum { FLOAT32, BFLOAT16 }; /* types of what pointers point at, which the callers know */

INLINE f32x16 splat(float value) { return value - (f32x16){0}; }

/* Returns 16 numbers of p from element i on, of any alignment. */
INLINE f32x16 load(const void *p, int64_t i, int type) {
    if (type == FLOAT32) {
        f32x16 values;
        memcpy(&values, (const float *)p + i, sizeof values);
        return values;
    }
    u16x16 halves;
    memcpy(&halves, (const uint16_t *)p + i, sizeof halves);
    return (f32x16)(__builtin_convertvector(halves, u32x16) << 16);
}

/* Stores 16 numbers, rounded to the nearest, ties to even. */
INLINE void store(void *p, int64_t i, f32x16 values, int type) {
    if (type == FLOAT32) {
        memcpy((float *)p + i, &values, sizeof values);
        return;
    }
    u32x16 bits = (u32x16)values;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_number = (u32x16)(values == values);
    rounded = (rounded & is_number) | (0x7fc0 & ~is_number);
    u16x16 halves = __builtin_convertvector(rounded, u16x16);
    memcpy((uint16_t *)p + i, &halves, sizeof halves);
}

INLINE f32x16 larger(f32x16 a, f32x16 b) {
    i32x16 take = a > b;
    return (f32x16)(((i32x16)a & take) | ((i32x16)b & ~take));
}

INLINE f32x4 fold(f32x16 v) {
    f32x8 halves[2];
    memcpy(halves, &v, sizeof v);
    f32x8 half = halves[0] + halves[1];
    f32x4 quarters[2];
    memcpy(quarters, &half, sizeof half);
    return quarters[0] + quarters[1];
}

/* Returns the sums of a, b, c and d. */
INLINE f32x4 sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
    f32x4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
    f32x4 ab = SHUFFLE4(a4, b4, 0, 1, 4, 5) + SHUFFLE4(a4, b4, 2, 3, 6, 7);
    f32x4 cd = SHUFFLE4(c4, d4, 0, 1, 4, 5) + SHUFFLE4(c4, d4, 2, 3, 6, 7);
    return SHUFFLE4(ab, cd, 0, 2, 4, 6) + SHUFFLE4(ab, cd, 1, 3, 5, 7);
}

INLINE float sum(f32x16 v) {
    f32x4 four = fold(v);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

INLINE float largest(f32x16 v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x to 2 units in the last place, for x brought into -87 .. 88; NaN stays.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2; e^r by the polynomial of Cephes' expf (S. Moshier). */
INLINE f32x16 exponential(f32x16 x) {
    i32x16 low = x < -87.0f, high = x > 88.0f;
    x = (f32x16)(((i32x16)x & ~(low | high)) | ((i32x16)splat(-87.0f) & low) |
                 ((i32x16)splat(88.0f) & high));
    f32x16 shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number */
    f32x16 n = shifted - 12582912.0f;
    f32x16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i32x16 exponent = ((i32x16)shifted - 0x4b400000 + 127) << 23;
    return p * (f32x16)exponent;
}

#endif
