/* All that stands between a decode step's QKV rows and its output product.
 *
 * A row is one sequence's one token. For each row and KV head: the norm of its key and of the
 * queries that read it, their rotation, the write of key and value to the paged cache, and
 * attention over it. No row waits for another, and each is computed in one way whatever its
 * company. Numbers are float32 but for those in qkv, cache and out.
 *
 *     qkv    [rows, >= (heads + 2 kv_heads) dim]      q, k, v; with `stores` 0: q alone
 *     cache  [blocks, block_size, 2, kv_heads, dim]   zlm.ops.kv_cache's
 *     out    [rows, heads * dim]
 *
 * Attention goes over CHUNK keys at a time: their scores, their softmax, on top of what has been
 * found (Milakov and Gimelshein, arXiv:1805.02867), then their values. Memory is asked for values
 * while scores are computed, and for the next keys while values are added. The keys of a long
 * sequence are cut into parts (PART_KEYS of zlm.ops.cpu_native), which several threads take; what
 * they find is put together after (Flash-Decoding). Where they are cut does not depend on the
 * number of threads.
 */

#include "cpu_vectors.h"

#define CHUNK 64
#define MAX_DIM 512
#define AHEAD 32 /* keys that the first chunk fetches ahead */

struct layer { /* the same for all steps */
    const float *q_norm, *k_norm; /* [dim], or none */
    const float *sinks;           /* [heads], or none */
    int32_t heads, kv_heads, dim, stores, type;
    float scale, softcap, eps;
};

struct part { /* keys begin .. end of a row; those of a row follow each other */
    int32_t row, begin, end;
};

struct found { /* of one head over some keys: the largest score, the sum of weights, of values */
    float most, weight;
    float values[MAX_DIM];
};

struct step { /* the same for all layers of a KV group */
    const int64_t *positions, *slots; /* [rows] */
    const int32_t *table;             /* [rows, width]: block numbers */
    const struct part *parts;         /* [num_parts] */
    struct found *found;              /* [num_parts, heads], if a row has several parts, or none */
    int64_t width;
    int32_t block_size, num_parts;
};

struct rotation { /* the same for all layers of a kind */
    const float *table; /* by positions, dim / 2 pairs of cosine and sine; or one factor for q */
    int64_t stride;
    int32_t is_factor;
};

struct work { /* a part of a row's keys, for the queries of one KV head */
    const struct layer *layer;
    const struct step *step;
    const struct part *part;
    const void *cache;
    int kv_head;
};

struct keys { /* some of them, one after another */
    int first, count;
    int64_t at[CHUNK]; /* their places in the cache */
};

static void turn(float *head, const float *factors, int dim) {
    for (int i = 0; i < dim; i += 2) {
        float real = head[i], other = head[i + 1];
        head[i] = real * factors[i] - other * factors[i + 1];
        head[i + 1] = real * factors[i + 1] + other * factors[i];
    }
}

/* Writes the head at x + at, normed, to out. */
INLINE void load_normed(const void *x, int64_t at, const float *norm, const struct layer *layer,
                        float *out, int type) {
    const float factor = norm ? norm_factor(x, at, layer->dim, layer->eps, type) : 1.0f;
    for (int i = 0; i < layer->dim; i += LANES) {
        floats values = load(x, at + i, type);
        if (norm) values = values * factor * load(norm, i, FLOAT32);
        store(out, i, values, FLOAT32);
    }
}

/* Asks for what is needed soon: into L2, which waits for more lines at a time than L1 does. */
INLINE void fetch(const void *cache, int64_t at, int count, const int type) {
    const int bytes = type == FLOAT32 ? 4 : 2;
    for (int line = 0; line < count * bytes; line += 64)
        __builtin_prefetch((const char *)cache + at * bytes + line, 0, 2);
}

/* Finds the keys from `first` on: as many as are left of the part, up to CHUNK. */
static void locate(const struct work *work, int first, struct keys *keys) {
    const struct layer *layer = work->layer;
    const int32_t *table = work->step->table + work->part->row * work->step->width;
    const int size = work->step->block_size, token = 2 * layer->kv_heads * layer->dim;
    const int left = work->part->end - first;
    keys->first = first;
    keys->count = left < CHUNK ? (left > 0 ? left : 0) : CHUNK;
    int block = first / size, offset = first % size;
    for (int i = 0; i < keys->count; i++) {
        keys->at[i] = ((int64_t)table[block] * size + offset) * token + work->kv_head * layer->dim;
        if (++offset == size) offset = 0, block++;
    }
}

/* Writes q . k of HEADS heads and all keys, whose number is rounded up to a multiple of 4. */
INLINE void multiply(const struct work *work, const float (*q)[MAX_DIM], const struct keys *keys,
                     float (*scores)[CHUNK], const int HEADS, const int type) {
    const int dim = work->layer->dim, last = keys->count - 1;
    const int64_t values = work->layer->kv_heads * dim;
    const int is_first = keys->first == work->part->begin;
    for (int i = 0; i < keys->count; i += 4) {
        int64_t at[4];
        for (int k = 0; k < 4; k++) {
            const int ahead = i + k + AHEAD;
            at[k] = keys->at[i + k < last ? i + k : last];
            fetch(work->cache, at[k] + values, dim, type);
            if (is_first && ahead <= last) fetch(work->cache, keys->at[ahead], dim, type);
        }
        floats dots[TILE][4] = {{{0}}};
        for (int d = 0; d < dim; d += LANES) {
            floats key[4];
            for (int k = 0; k < 4; k++) key[k] = load(work->cache, at[k] + d, type);
            for (int h = 0; h < HEADS; h++) {
                floats query = load(q[h], d, FLOAT32);
                for (int k = 0; k < 4; k++) dots[h][k] += query * key[k];
            }
        }
        for (int h = 0; h < HEADS; h++) {
            f32x4 four = sums(dots[h][0], dots[h][1], dots[h][2], dots[h][3]);
            memcpy(&scores[h][i], &four, sizeof four);
        }
    }
}

/* Turns products into weights, and what was found before into what it is beside them. */
static void weigh(const struct layer *layer, float *scores, int count, struct found *found,
                  float *shrink) {
    floats most = splat(found->most);
    int whole = (count + LANES - 1) / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) { /* those past the last become -inf below */
        floats values = load(scores, i, FLOAT32) * layer->scale;
        if (layer->softcap) { /* c tanh(s / c), with tanh y = 1 - 2 / (e^2y + 1) */
            floats twice = exponential(values * (2.0f / layer->softcap));
            values = layer->softcap * (1.0f - 2.0f / (twice + 1.0f));
        }
        store(scores, i, values, FLOAT32);
        for (int k = count; k < i + LANES; k++) scores[k] = -INFINITY;
        most = larger(load(scores, i, FLOAT32), most);
    }
    float now = largest(most);
    *shrink = exponential(splat(found->most - now))[0];
    floats total = {0};
    for (int i = 0; i < whole; i += LANES) {
        floats weights = exponential(load(scores, i, FLOAT32) - now);
        store(scores, i, weights, FLOAT32);
        total += weights;
    }
    found->weight = found->weight * *shrink + sum(total);
    found->most = now;
}

/* Adds weighted values, VECTORS vectors of them from dimension d on. */
INLINE void add_values(const struct work *work, const struct keys *keys, const struct keys *next,
                       int d, const float (*weights)[CHUNK], const float *shrink,
                       struct found *found, const int HEADS, const int VECTORS, const int type) {
    const int64_t values = work->layer->kv_heads * work->layer->dim + d;
    floats totals[TILE][4];
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < VECTORS; v++)
            totals[h][v] = load(found[h].values, d + v * LANES, FLOAT32) * shrink[h];
    for (int i = 0; i < keys->count; i++) {
        if (i < next->count) fetch(work->cache, next->at[i] + d, VECTORS * LANES, type);
        for (int v = 0; v < VECTORS; v++) {
            floats value = load(work->cache, keys->at[i] + values + v * LANES, type);
            for (int h = 0; h < HEADS; h++) totals[h][v] += weights[h][i] * value;
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int v = 0; v < VECTORS; v++)
            store(found[h].values, d + v * LANES, totals[h][v], FLOAT32);
}

INLINE void attend(const struct work *work, const float (*q)[MAX_DIM], struct found *found,
                   const int HEADS, const int type) {
    const int dim = work->layer->dim;
    struct keys chunks[2], *keys = &chunks[0], *next = &chunks[1];
    float scores[TILE][CHUNK], shrink[TILE];
    locate(work, work->part->begin, keys);
    while (keys->count) {
        multiply(work, q, keys, scores, HEADS, type);
        locate(work, keys->first + CHUNK, next);
        for (int h = 0; h < HEADS; h++)
            weigh(work->layer, scores[h], keys->count, &found[h], &shrink[h]);
        int d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
            add_values(work, keys, next, d, scores, shrink, found, HEADS, 4, type);
        for (; d < dim; d += LANES)
            add_values(work, keys, next, d, scores, shrink, found, HEADS, 1, type);
        struct keys *done = keys;
        keys = next, next = done;
    }
}

INLINE void attend_heads(const struct work *work, const float (*q)[MAX_DIM], struct found *found,
                         int heads, const int type) {
    if (heads == 1)
        attend(work, q, found, 1, type);
    else if (heads == 2 || TILE == 2)
        attend(work, q, found, 2, type);
    else if (TILE > 2 && heads == 3)
        attend(work, q, found, 3, type);
    else
        attend(work, q, found, TILE, type);
}

/* Writes what `count` parts, `stride` apart, have found of one head to out + at. */
static void finish(const struct found *found, int count, int64_t stride, void *out, int64_t at,
                   int dim, int type) {
    float most = found->most, weight = 0;
    floats totals[MAX_DIM / LANES] = {{0}};
    for (int p = 1; p < count; p++)
        most = found[p * stride].most > most ? found[p * stride].most : most;
    for (int p = 0; p < count; p++) {
        const struct found *part = found + p * stride;
        float share = exponential(splat(part->most - most))[0];
        weight += share * part->weight;
        for (int i = 0; i < dim; i += LANES)
            totals[i / LANES] += share * load(part->values, i, FLOAT32);
    }
    for (int i = 0; i < dim; i += LANES) store(out, at + i, totals[i / LANES] / weight, type);
}

/* Stores the key, normed and turned, and the value of the row's own token. */
INLINE void store_own(const struct work *work, const float *factors, const void *qkv, int64_t own,
                      void *cache, const int type) {
    const struct layer *layer = work->layer;
    const int dim = layer->dim, row = work->part->row;
    const int64_t apart = (int64_t)layer->kv_heads * dim;
    const int64_t key = own + (int64_t)(layer->heads + work->kv_head) * dim;
    const int64_t to = work->step->slots[row] * 2 * apart + work->kv_head * dim;
    float head[MAX_DIM];
    load_normed(qkv, key, layer->k_norm, layer, head, type);
    if (factors) turn(head, factors, dim);
    for (int i = 0; i < dim; i += LANES) {
        store(cache, to + i, load(head, i, FLOAT32), type);
        store(cache, to + apart + i, load(qkv, key + apart + i, type), type);
    }
}

/* Attention of a row's queries that read one KV head, over a part of their keys. */
INLINE void attend_part(const struct work *work, const struct rotation *rotation, const void *qkv,
                        void *cache, void *out, const int type) {
    const struct layer *layer = work->layer;
    const struct part *part = work->part;
    const int dim = layer->dim, group = layer->heads / layer->kv_heads;
    const int64_t position = work->step->positions[part->row];
    const int64_t q_row = (int64_t)layer->heads * dim;
    const int64_t kv_row = layer->stores ? 2 * (int64_t)layer->kv_heads * dim : 0;
    const int64_t own = part->row * (q_row + kv_row);
    const float *factors = rotation->table + position * rotation->stride;
    const int is_first = part == work->step->parts || part[-1].row != part->row;
    if (layer->stores && part->end == position + 1)
        store_own(work, rotation->is_factor ? NULL : factors, qkv, own, cache, type);
    struct found *partial = work->step->found;
    if (partial) partial += (part - work->step->parts) * layer->heads;
    for (int first = 0; first < group; first += TILE) {
        const int count = group - first < TILE ? group - first : TILE;
        const int head = work->kv_head * group + first;
        float q[TILE][MAX_DIM];
        struct found whole[TILE], *found = partial ? partial + head : whole;
        for (int h = 0; h < count; h++) {
            load_normed(qkv, own + (int64_t)(head + h) * dim, layer->q_norm, layer, q[h], type);
            if (!rotation->is_factor) turn(q[h], factors, dim);
            for (int i = 0; rotation->is_factor && i < dim; i++) q[h][i] *= factors[0];
            const int has_sink = is_first && layer->sinks;
            found[h].most = has_sink ? layer->sinks[head + h] : -INFINITY;
            found[h].weight = has_sink;
            memset(found[h].values, 0, dim * sizeof(float));
        }
        attend_heads(work, q, found, count, type);
        for (int h = 0; h < count && !partial; h++)
            finish(&found[h], 1, 0, out, part->row * q_row + (int64_t)(head + h) * dim, dim, type);
    }
}

int zlm_found_bytes(void) { return sizeof(struct found); }

/* See above. One thread takes a part of a row for one KV head. */
void zlm_decode_attention(const struct layer *layer, const struct step *step,
                          const struct rotation *rotation, const void *qkv, void *cache,
                          void *out) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int item = 0; item < step->num_parts * layer->kv_heads; item++) {
        const struct part *part = step->parts + item / layer->kv_heads;
        struct work work = {layer, step, part, cache, item % layer->kv_heads};
        if (layer->type == FLOAT32)
            attend_part(&work, rotation, qkv, cache, out, FLOAT32);
        else
            attend_part(&work, rotation, qkv, cache, out, BFLOAT16);
    }
    if (!step->found) return;
    for (int i = 0, count; i < step->num_parts; i += count) {
        const int row = step->parts[i].row;
        for (count = 1; i + count < step->num_parts && step->parts[i + count].row == row;) count++;
        for (int64_t head = 0; head < layer->heads; head++)
            finish(step->found + (int64_t)i * layer->heads + head, count, layer->heads, out,
                   (row * layer->heads + head) * layer->dim, layer->dim, layer->type);
    }
}
