/* RMS normalisation of rows. */

#include "cpu_vectors.h"

#define PARALLEL_ELEMENTS 65536 /* from which on several threads are worth waking */

INLINE void norm_row(const void *x, const float *weight, float eps, void *out, int64_t i_row,
                     int size, int type, int out_type) {
    int64_t first = i_row * size;
    float factor = norm_factor(x, first, size, eps, type);
    for (int i = 0; i < size; i += LANES) {
        floats values = load(x, first + i, type) * factor;
        store(out, first + i, values * load(weight, i, FLOAT32), out_type);
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight; x and out [rows, size], size a multiple of LANES. */
void zlm_rms_norm(const void *x, const float *weight, float eps, void *out, int64_t rows, int size,
                  int type, int out_type) {
#pragma omp parallel for schedule(static) if (rows * size >= PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        if (type == BFLOAT16 && out_type == BFLOAT16)
            norm_row(x, weight, eps, out, row, size, BFLOAT16, BFLOAT16);
        else
            norm_row(x, weight, eps, out, row, size, type, out_type);
    }
}
