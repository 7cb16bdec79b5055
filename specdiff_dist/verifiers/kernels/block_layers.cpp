// Llama's layers over matrices of 4-bit and 8-bit blocks (GGUF's Q4_1 and Q8_0), for the few rows of a verify call.
//
// What costs time on a CPU is reading the matrices. They stay in their blocks, are read once a forward, and become float32
// in registers; activations and sums are float32 throughout, so that the numbers are those of a float32 model up to the
// order of its sums. That order is the same however many rows there are: a row never depends on the rows beside it.
//
// Vectors are GCC's and Clang's own (no intrinsics), so one text serves AVX2, AVX-512 and NEON. Compiled on the machine it
// runs on, see build.py; called from matrix.py and layers.py, whose structures mirror those of this file.
#include <omp.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int LANES = 16;  // float32 numbers of a vector
constexpr int ROWS = 12;   // rows computed together at most: the sums of two vectors of each fit the registers
#else
constexpr int LANES = 8;
constexpr int ROWS = 6;
#endif
constexpr int BLOCK = 32;      // inputs of an output that share a scale
constexpr int TILE = 32;       // outputs that lie together
constexpr int MAX_HEAD = 256;  // largest head_dim

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

extern "C" {
struct Matrix {  // [outputs, inputs]
    const uint8_t *data;  // [outputs / TILE][inputs / BLOCK] blocks, see `unpacked`
    int32_t inputs, outputs, bits;
};

struct Shape {
    int32_t hidden, inner, heads, kv_heads, head_dim;
    float eps;
};

struct Layer {
    const float *input_norm, *mlp_norm;
    Matrix qkv, attention_output, gate_up, down;
};

// Keys and values of one session: [kv_heads, capacity, head_dim] of the first layer, behind them those of the next.
struct Cache {
    float *keys, *values;
    int64_t capacity;
};

// A row: its cache, its token's place there, and the first place that it may not look at.
struct Row {
    int32_t cache, position, end;
};
}

static Floats all(float x) { return x - Floats{}; }

static float lanes_sum(Floats x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}

// ---- products ----

// float16 to float32, exactly; scales are finite.
static Floats widened(Halves half) {
    Words word = __builtin_convertvector(half, Words);
    return (Floats)((word & 0x7fff) << 13 | (word & 0x8000) << 16) * 0x1p112f;
}

// A block of a tile: for each 32 / bits inputs TILE words, one of each output, the first input in the lowest bits; then
// TILE float16 scales; with 4 bits, TILE float16 offsets.
constexpr int block_bytes(int bits) { return TILE * BLOCK * bits / 8 + 2 * TILE * (bits == 4 ? 2 : 1); }

// Input `j` of words. 4 bits: times 16^j (the last one times 1), which saves the shift and `prepare` undoes in x; 8 bits,
// signed: times 2^24, which the scale undoes. Powers of two: nothing is rounded.
template <int BITS>
static inline Floats unpacked(Words word, int j) {
    if (BITS == 4) return __builtin_convertvector((Ints)(j < 7 ? word & (0xfu << 4 * j) : word >> 28), Floats);
    return __builtin_convertvector((Ints)((word << (24 - 8 * j)) & 0xff000000u), Floats);
}

// A row of a product's input, in place, and the sums of its blocks (which the offsets multiply).
static void prepare(float *x, float *sums, int inputs, int bits) {
    static const float undo[8] = {1, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1};
    if (bits != 4) return;
    for (int b = 0; b < inputs / BLOCK; b++, x += BLOCK) {
        float sum = 0;
        for (int i = 0; i < BLOCK; i++) sum += x[i], x[i] *= undo[i % 8];
        sums[b] = sum;
    }
}

// Prepared rows and their block sums.
struct Input {
    float *rows, *sums;
    int size;

    Input(float *scratch, int num_rows, int size) : rows(scratch), sums(scratch + (size_t)num_rows * size), size(size) {}
    float *row(int r) const { return rows + (size_t)r * size; }
    void done(int r, int bits) const { prepare(row(r), sums + (size_t)r * (size / BLOCK), size, bits); }
};

// NUM_ROWS rows of NUM_VECTORS vectors of a tile's outputs, from vector `first` on. ADDS: out += instead of out =.
template <int BITS, int NUM_ROWS, int NUM_VECTORS, bool ADDS>
static inline void tile_part(const uint8_t *tile, int blocks, const float *x, const float *sums, float *out, int stride,
                             int first) {
    constexpr int PER_WORD = 32 / BITS;
    const int inputs = blocks * BLOCK;
    Floats total[NUM_ROWS][NUM_VECTORS] = {};
    for (int b = 0; b < blocks; b++, tile += block_bytes(BITS)) {
        // The totals stay in memory: the registers are for this block's sums.
        asm volatile("" ::"r"(total) : "memory");
        Floats sum[NUM_ROWS][NUM_VECTORS] = {};
        const uint8_t *at = tile + first * 4 * LANES;
        const float *from = x + b * BLOCK;
        for (int g = 0; g < BLOCK / PER_WORD; g++, at += 4 * TILE, from += PER_WORD) {
            Words word[NUM_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < NUM_VECTORS; v++) word[v] = *(const Words *)(at + v * 4 * LANES);
#pragma GCC unroll 8
            for (int j = 0; j < PER_WORD; j++) {
                Floats weight[NUM_VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < NUM_VECTORS; v++) weight[v] = unpacked<BITS>(word[v], j);
#pragma GCC unroll 12
                for (int r = 0; r < NUM_ROWS; r++) {
                    const Floats one = all(from[(size_t)r * inputs + j]);
#pragma GCC unroll 4
                    for (int v = 0; v < NUM_VECTORS; v++) sum[r][v] += weight[v] * one;
                }
            }
        }
        const uint16_t *halves = (const uint16_t *)(tile + TILE * BLOCK * BITS / 8) + first * LANES;
#pragma GCC unroll 4
        for (int v = 0; v < NUM_VECTORS; v++) {
            const Floats scale = widened(*(const Halves *)(halves + v * LANES)) * (BITS == 4 ? 1 : 0x1p-24f);
#pragma GCC unroll 12
            for (int r = 0; r < NUM_ROWS; r++) total[r][v] += scale * sum[r][v];
            if (BITS == 4) {
                const Floats offset = widened(*(const Halves *)(halves + TILE + v * LANES));
#pragma GCC unroll 12
                for (int r = 0; r < NUM_ROWS; r++) total[r][v] += offset * sums[(size_t)r * blocks + b];
            }
        }
    }
    for (int r = 0; r < NUM_ROWS; r++)
        for (int v = 0; v < NUM_VECTORS; v++) {
            Floats *to = (Floats *)(out + (size_t)r * stride + (first + v) * LANES);
            *to = ADDS ? *to + total[r][v] : total[r][v];
        }
}

template <int BITS, int NUM_ROWS, bool ADDS>
static void tile_rows(const uint8_t *tile, int blocks, const float *x, const float *sums, float *out, int stride) {
    // Few rows take all vectors at once, so that enough independent sums are under way.
    constexpr int VECTORS = NUM_ROWS <= ROWS / 4 ? TILE / LANES : 2;
    for (int first = 0; first < TILE / LANES; first += VECTORS)
        tile_part<BITS, NUM_ROWS, VECTORS, ADDS>(tile, blocks, x, sums, out, stride, first);
}

typedef void (*TileRows)(const uint8_t *, int, const float *, const float *, float *, int);

template <int BITS, bool ADDS>
static TileRows tile_of(int num_rows) {
#define FOR(N) tile_rows<BITS, N, ADDS>
    static const TileRows by_rows[] = {FOR(1), FOR(2), FOR(3), FOR(4),  FOR(5),  FOR(6),
#if defined(__AVX512F__)
                                       FOR(7), FOR(8), FOR(9), FOR(10), FOR(11), FOR(12),
#endif
    };
#undef FOR
    return by_rows[num_rows - 1];
}

// out [num_rows, outputs] = (or, ADDS, +=) x @ matrix.T. Called by all threads of a parallel region: each takes its tiles.
template <bool ADDS>
static void product(const Matrix &m, const Input &x, int num_rows, float *out) {
    const int blocks = m.inputs / BLOCK, num_parts = (num_rows + ROWS - 1) / ROWS;
    const size_t size = (size_t)blocks * block_bytes(m.bits);
#pragma omp for schedule(static)
    for (int t = 0; t < m.outputs / TILE; t++)
        for (int part = 0; part < num_parts; part++) {  // of about equal size: the last one is no lonely row
            const int from = num_rows * part / num_parts, count = num_rows * (part + 1) / num_parts - from;
            const TileRows tile = m.bits == 4 ? tile_of<4, ADDS>(count) : tile_of<8, ADDS>(count);
            float *to = out + (size_t)from * m.outputs + t * TILE;
            tile(m.data + t * size, blocks, x.row(from), x.sums + (size_t)from * blocks, to, m.outputs);
        }
}

// ---- the rest of a layer ----

// e^x for x ≤ 0 to about 1e-7 of it (Cephes' expf).
static Floats exponential(Floats x) {
    x = x > -87.0f ? x : all(-87.0f);
    Floats n = x * 1.44269504f + 12582912.0f;  // the sum's low bits are the nearest integer
    const Ints whole = (Ints)n;
    n -= 12582912.0f;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = all(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return (Floats)((Ints)y + (whole << 23));
}

static void rms_norm(const float *x, const float *weight, float *out, int size, float eps) {
    Floats squares = {};
    for (int i = 0; i < size; i += LANES) {
        const Floats v = *(const Floats *)(x + i);
        squares += v * v;
    }
    const float scale = 1 / std::sqrt(lanes_sum(squares) / size + eps);
    for (int i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// x [size] in place; cos, sin [size], the first half of sin negated.
static void rotate(float *x, const float *cos, const float *sin, int size) {
    for (int i = 0, half = size / 2; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] + b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// out [dim] = softmax(query · keys / √dim) · values over `end` of them. weights: scratch, [end + LANES].
static inline __attribute__((always_inline)) void attend(const float *query, const float *keys, const float *values, int end,
                                                         float *out, float *weights, int dim) {
    const int parts = dim / LANES, padded = (end + LANES - 1) / LANES * LANES;
    const float scale = 1 / std::sqrt((float)dim);
    Floats q[MAX_HEAD / LANES], sum[MAX_HEAD / LANES], largest = all(-INFINITY), total = {};
    for (int p = 0; p < parts; p++) q[p] = ((const Floats *)query)[p] * scale, sum[p] = all(0);
    for (int j = 0; j < end; j++) {
        const Floats *key = (const Floats *)(keys + (size_t)j * dim);
        Floats dot = q[0] * key[0];
        for (int p = 1; p < parts; p++) dot += q[p] * key[p];
        weights[j] = lanes_sum(dot);
    }
    for (int j = end; j < padded; j++) weights[j] = -INFINITY;
    for (int j = 0; j < padded; j += LANES) {
        const Floats w = *(const Floats *)(weights + j);
        largest = w > largest ? w : largest;
    }
    float most = largest[0];
    for (int i = 1; i < LANES; i++) most = largest[i] > most ? largest[i] : most;
    for (int j = 0; j < padded; j += LANES) {
        Floats *w = (Floats *)(weights + j);
        *w = exponential(*w - most);
        for (int i = end - j; i < LANES; i++) weights[j + i] = 0;  // of the last vector, what lies behind the end
        total += *w;
    }
    for (int j = 0; j < end; j++) {
        const Floats *value = (const Floats *)(values + (size_t)j * dim);
        for (int p = 0; p < parts; p++) sum[p] += value[p] * weights[j];
    }
    const float whole = 1 / lanes_sum(total);
    for (int p = 0; p < parts; p++) ((Floats *)out)[p] = sum[p] * whole;
}

// out [size] = silu(gate) · up.
static void gated(const float *gate, const float *up, float *out, int size) {
    for (int i = 0; i < size; i += LANES) {
        const Floats g = *(const Floats *)(gate + i), e = exponential(g < 0 ? g : -g);
        *(Floats *)(out + i) = g * ((g < 0 ? e : all(1)) / (e + 1)) * *(const Floats *)(up + i);
    }
}

extern "C" {

int32_t tile_outputs() { return TILE; }

// out [num_rows, outputs] = x [num_rows, inputs] @ m.T. scratch: num_rows · (inputs + inputs / BLOCK) floats.
void block_linear(const Matrix *m, const float *x, int32_t num_rows, float *out, float *scratch, int32_t num_threads) {
    const Input in(scratch, num_rows, m->inputs);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int r = 0; r < num_rows; r++) {
            memcpy(in.row(r), x + (size_t)r * in.size, sizeof(float) * in.size);
            in.done(r, m->bits);
        }
        product<false>(*m, in, num_rows, out);
    }
}

// Floats of scratch that `block_layers` needs. longest: the largest `end` of its rows.
int64_t scratch_size(const Shape *s, int32_t num_rows, int32_t longest, int32_t num_threads) {
    const int query = s->heads * s->head_dim, qkv = query + 2 * s->kv_heads * s->head_dim;
    int widest = query > s->hidden ? query : s->hidden;
    widest = s->inner > widest ? s->inner : widest;
    return (int64_t)num_rows * (qkv + 2 * s->inner + widest + widest / BLOCK) + (int64_t)num_threads * (longest + LANES);
}

// Runs `num_layers` layers over the rows x [num_rows, hidden], in place, and writes their keys and values into the caches.
// kept: the rows that the last layer's output is wanted of, ascending, which end up first in x; null: all.
// cos, sin: [positions, head_dim], the first half of sin negated.
void block_layers(const Shape *s, const Layer *layers, int32_t num_layers, const Cache *caches, const Row *rows,
                  int32_t num_rows, const int32_t *kept, int32_t num_kept, const float *cos, const float *sin, float *x,
                  float *scratch, int32_t longest, int32_t num_threads) {
    const int hidden = s->hidden, inner = s->inner, dim = s->head_dim, group = s->heads / s->kv_heads;
    const int query_size = s->heads * dim, kv_size = s->kv_heads * dim, qkv_size = query_size + 2 * kv_size;
    float *qkv = scratch, *gate_up = qkv + (size_t)num_rows * qkv_size, *weights = gate_up + (size_t)num_rows * 2 * inner;
    float *inputs = weights + (size_t)num_threads * (longest + LANES);
    // One of these at a time.
    const Input normed(inputs, num_rows, hidden), attended(inputs, num_rows, query_size), mixed(inputs, num_rows, inner);

#pragma omp parallel num_threads(num_threads)
    for (int index = 0; index < num_layers; index++) {
        const Layer &layer = layers[index];
        const bool keeps = kept != nullptr && index == num_layers - 1;
        const int count = keeps ? num_kept : num_rows;
        const size_t layer_at = (size_t)index * s->kv_heads;
#pragma omp for schedule(static)
        for (int r = 0; r < num_rows; r++) {
            rms_norm(x + (size_t)r * hidden, layer.input_norm, normed.row(r), hidden, s->eps);
            normed.done(r, layer.qkv.bits);
        }
        product<false>(layer.qkv, normed, num_rows, qkv);
#pragma omp for schedule(static)
        for (int r = 0; r < num_rows; r++) {
            const Cache &cache = caches[rows[r].cache];
            const size_t turn = (size_t)rows[r].position * dim;
            float *row = qkv + (size_t)r * qkv_size, *key = row + query_size, *value = key + kv_size;
            for (int h = 0; h < s->heads + s->kv_heads; h++) rotate(row + h * dim, cos + turn, sin + turn, dim);
            for (int h = 0; h < s->kv_heads; h++) {
                const size_t slot = ((layer_at + h) * cache.capacity + rows[r].position) * dim;
                memcpy(cache.keys + slot, key + h * dim, sizeof(float) * dim);
                memcpy(cache.values + slot, value + h * dim, sizeof(float) * dim);
            }
        }
#pragma omp for schedule(dynamic)
        for (int i = 0; i < count * s->heads; i++) {
            const int k = i / s->heads, h = i % s->heads, r = keeps ? kept[k] : k;
            const Cache &cache = caches[rows[r].cache];
            const size_t from = (layer_at + h / group) * cache.capacity * dim;
            const float *query = qkv + (size_t)r * qkv_size + h * dim, *keys = cache.keys + from, *values = cache.values + from;
            float *to = attended.row(k) + h * dim, *own = weights + (size_t)omp_get_thread_num() * (longest + LANES);
            if (dim == 64) attend(query, keys, values, rows[r].end, to, own, 64);
            else attend(query, keys, values, rows[r].end, to, own, dim);
            prepare(to, attended.sums + (k * s->heads + h) * (dim / BLOCK), dim, layer.attention_output.bits);
        }
        if (keeps) {
#pragma omp single
            for (int k = 0; k < count; k++)
                memmove(x + (size_t)k * hidden, x + (size_t)kept[k] * hidden, sizeof(float) * hidden);
        }
        product<true>(layer.attention_output, attended, count, x);
#pragma omp for schedule(static)
        for (int r = 0; r < count; r++) {
            rms_norm(x + (size_t)r * hidden, layer.mlp_norm, normed.row(r), hidden, s->eps);
            normed.done(r, layer.gate_up.bits);
        }
        product<false>(layer.gate_up, normed, count, gate_up);
#pragma omp for schedule(static)
        for (int r = 0; r < count; r++) {
            const float *gate = gate_up + (size_t)r * 2 * inner;
            gated(gate, gate + inner, mixed.row(r), inner);
            mixed.done(r, layer.down.bits);
        }
        product<true>(layer.down, mixed, count, x);
    }
}
}
