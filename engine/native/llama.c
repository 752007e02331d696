/* One step of a Llama on the CPU, in one call: no interpreter, no lock and no temporary between its operations.
 *
 * Every output element is computed in one fixed order that depends on its own row alone: a row's bits are the same
 * whatever else is in the batch, however its prompt was cut into chunks, cached or not.
 *
 *   weights   panels of 16 outputs: P[n / 16][k][n % 16], float or bf16 (upper half of a float); arithmetic is float
 *   kv        per layer K and V, [slots][kv heads * head size] float; slot = page * page size + offset
 *   rows      tokens of the step, T of them; row t belongs to sequence seq[t] and attends to its first pos[t] + 1 tokens
 *
 * Written in GCC vector extensions: the compiler makes AVX2, AVX-512 or NEON of it (clang takes it too). */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define NR 16 /* outputs in a panel: two vectors of eight */
#define MR 6  /* rows in a register tile: 12 accumulators of the 16 that AVX2 has */
typedef float v8 __attribute__((vector_size(32)));
typedef float v8u __attribute__((vector_size(32), aligned(4)));
typedef uint32_t u8v __attribute__((vector_size(32)));
typedef int32_t i8v __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2)));

enum { F32 = 0, BF16 = 1 };
static inline v8 select8(i8v mask, v8 yes, v8 no) { return (v8)((mask & (i8v)yes) | (~mask & (i8v)no)); }

struct layer {
    const float *norm1, *norm2;
    const void *qkv, *o, *gate_up, *down;
    float *k, *v;
};
struct model {
    int32_t n_layers, hidden, ffn, heads, kv_heads, head_dim, vocab, type, threads, page;
    float eps, scale;
    const float *norm, *cos, *sin; /* cos, sin: [position][head_dim / 2] */
    const void *embedding, *head;  /* both as panels; the same array when tied */
    const struct layer *layers;
};
struct step {
    int32_t rows, sampled, table_width;
    const int32_t *ids, *pos, *seq; /* [rows] */
    const int64_t *slots;           /* [rows], where the row's K and V go */
    const int32_t *tables;          /* [sequences][table_width] pages */
    const int32_t *sample;          /* [sampled] rows whose logits are wanted */
    float *logits;                  /* [sampled][vocab] */
    float *x, *norm, *wide, *mix;   /* scratch: [rows][hidden], [rows][max(hidden, heads*head_dim)], [rows][max(qkv, 2*ffn)], [rows][max(heads*head_dim, ffn)] */
    float *scores;                  /* scratch: [threads][heads / kv_heads][longest context] */
    int32_t longest;
};

static inline __attribute__((always_inline)) void load16(const void *panel, int type, size_t k, v8 *a, v8 *b) {
    if (type == F32) {
        const float *p = (const float *)panel + k * NR;
        *a = *(const v8u *)p, *b = *(const v8u *)(p + 8);
    } else {
        const uint16_t *p = (const uint16_t *)panel + k * NR;
        *a = (v8)(__builtin_convertvector(*(const h8 *)p, u8v) << 16);
        *b = (v8)(__builtin_convertvector(*(const h8 *)(p + 8), u8v) << 16);
    }
}

/* out[m][0..15] (+)= x[m][0..K) . panel, for m rows; the order over k never changes */
static inline __attribute__((always_inline)) void tile(const int m, int type, const float *x, size_t ldx, const void *panel, int K,
                                                       float *out, size_t ldo, int add) {
    v8 lo[MR], hi[MR];
    for (int i = 0; i < m; i++) lo[i] = (v8){0}, hi[i] = (v8){0};
    for (int k = 0; k < K; k++) {
        v8 a, b;
        load16(panel, type, (size_t)k, &a, &b);
        for (int i = 0; i < m; i++) {
            float s = x[i * ldx + k];
            v8 w = {s, s, s, s, s, s, s, s};
            lo[i] += w * a, hi[i] += w * b;
        }
    }
    for (int i = 0; i < m; i++) {
        v8u *o = (v8u *)(out + i * ldo), *p = (v8u *)(out + i * ldo + 8);
        if (add) *o += lo[i], *p += hi[i];
        else *o = lo[i], *p = hi[i];
    }
}
static inline __attribute__((always_inline)) void panel_rows(int type, const float *x, size_t ldx, const void *panel, int K, int rows,
                                                             float *out, size_t ldo, int add) {
    int r = 0;
    for (; r + MR <= rows; r += MR) tile(MR, type, x + r * ldx, ldx, panel, K, out + r * ldo, ldo, add);
    x += r * ldx, out += r * ldo;
    switch (rows - r) {
        case 5: tile(5, type, x, ldx, panel, K, out, ldo, add); break;
        case 4: tile(4, type, x, ldx, panel, K, out, ldo, add); break;
        case 3: tile(3, type, x, ldx, panel, K, out, ldo, add); break;
        case 2: tile(2, type, x, ldx, panel, K, out, ldo, add); break;
        case 1: tile(1, type, x, ldx, panel, K, out, ldo, add); break;
    }
}
/* out[rows][N] (+)= x[rows][K] . W^T; N is a multiple of 16.  Called by all threads; ends with a barrier. */
static void linear(int type, const float *x, size_t ldx, const void *w, int K, int N, int rows, float *out, size_t ldo, int add) {
    size_t bytes = (size_t)K * NR * (type == F32 ? 4 : 2);
#pragma omp for schedule(dynamic, 2)
    for (int p = 0; p < N / NR; p++) {
        const char *panel = (const char *)w + (size_t)p * bytes;
        if (type == F32) panel_rows(F32, x, ldx, panel, K, rows, out + p * NR, ldo, add);
        else panel_rows(BF16, x, ldx, panel, K, rows, out + p * NR, ldo, add);
    }
}

static float dot(const float *a, const float *b, int n) { /* n: a multiple of 8 */
    v8 s = {0};
    for (int i = 0; i < n; i += 8) s += *(const v8u *)(a + i) * *(const v8u *)(b + i);
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
static void rms_norm(const float *x, const float *weight, int n, float eps, float *out) {
    float r = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * r * weight[i];
}
/* e^x for x <= 88, error below 2 ulp: 2^n * polynomial on [-ln2/2, ln2/2] (the minimax of Cephes' expf) */
static inline v8 exp8(v8 x) {
    x = select8(x < -87.0f, (v8){0} - 87.0f, x);
    v8 n = x * 1.44269504088896341f + 12582912.0f; /* adds 1.5 * 2^23: rounds to an integer */
    i8v e = (i8v)n - 0x4B400000;
    n -= 12582912.0f;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    v8 y = {0};
    y = y + 1.9875691500e-4f;
    y = y * x + 1.3981999507e-3f, y = y * x + 8.3334519073e-3f, y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f, y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (v8)((e + 127) << 23);
}

/* one row, one kv head: its group of query heads over the row's context, page by page, in the order of positions */
static void attend(const struct model *m, const struct layer *l, const struct step *s, int row, int head, float *scores) {
    const int hd = m->head_dim, group = m->heads / m->kv_heads, width = m->kv_heads * hd, n = s->pos[row] + 1;
    const int qkv = (m->heads + 2 * m->kv_heads) * hd, vecs = hd / 8, padded = (n + 7) & ~7;
    const int32_t *table = s->tables + (size_t)s->seq[row] * s->table_width;
    const float *q = s->wide + (size_t)row * qkv + (size_t)head * group * hd;
    float *out = s->mix + (size_t)row * m->heads * hd + (size_t)head * group * hd;
    float top[16];
    for (int g = 0; g < group; g++) top[g] = -INFINITY;
    for (int t = 0; t < n; t++) {
        const float *k = l->k + ((size_t)table[t / m->page] * m->page + t % m->page) * width + (size_t)head * hd;
        for (int g = 0; g < group; g++) {
            float x = dot(q + g * hd, k, hd) * m->scale;
            scores[(size_t)g * s->longest + t] = x;
            if (x > top[g]) top[g] = x;
        }
    }
    float inverse[16];
    for (int g = 0; g < group; g++) {
        float *row_scores = scores + (size_t)g * s->longest;
        for (int t = n; t < padded; t++) row_scores[t] = -INFINITY;
        v8 sum = {0};
        for (int t = 0; t < padded; t += 8) {
            v8 x = *(v8u *)(row_scores + t) - top[g], y = exp8(x);
            y = select8(x < -87.0f, (v8){0}, y);
            *(v8u *)(row_scores + t) = y, sum += y;
        }
        inverse[g] = 1.0f / (((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7])));
    }
    memset(out, 0, sizeof(float) * (size_t)(group * hd));
    for (int t = 0; t < n; t++) {
        const float *v = l->v + ((size_t)table[t / m->page] * m->page + t % m->page) * width + (size_t)head * hd;
        for (int g = 0; g < group; g++) {
            float w = scores[(size_t)g * s->longest + t];
            v8u *o = (v8u *)(out + g * hd);
            for (int i = 0; i < vecs; i++) o[i] += *(const v8u *)(v + i * 8) * w;
        }
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < hd; i++) out[g * hd + i] *= inverse[g];
}

static void rotate(float *x, const float *cos, const float *sin, int heads, int hd) {
    for (int h = 0; h < heads; h++, x += hd)
        for (int i = 0; i < hd / 2; i++) {
            float a = x[i], b = x[i + hd / 2];
            x[i] = a * cos[i] - b * sin[i], x[i + hd / 2] = b * cos[i] + a * sin[i];
        }
}

void tailspan_forward(const struct model *m, const struct step *s) {
    const int T = s->rows, H = m->hidden, hd = m->head_dim, kv_width = m->kv_heads * hd, q_width = m->heads * hd;
    const int qkv = q_width + 2 * kv_width;
#pragma omp parallel num_threads(m->threads)
    {
#pragma omp for
        for (int t = 0; t < T; t++) {
            size_t at = (size_t)(s->ids[t] / NR) * H * NR + s->ids[t] % NR;
            for (int i = 0; i < H; i++)
                if (m->type == F32) s->x[(size_t)t * H + i] = ((const float *)m->embedding)[at + (size_t)i * NR];
                else {
                    uint32_t bits = (uint32_t)((const uint16_t *)m->embedding)[at + (size_t)i * NR] << 16;
                    memcpy(&s->x[(size_t)t * H + i], &bits, 4);
                }
        }
        for (int n = 0; n < m->n_layers; n++) {
            const struct layer *l = m->layers + n;
#pragma omp for
            for (int t = 0; t < T; t++) rms_norm(s->x + (size_t)t * H, l->norm1, H, m->eps, s->norm + (size_t)t * H);
            linear(m->type, s->norm, H, l->qkv, H, qkv, T, s->wide, qkv, 0);
#pragma omp for
            for (int t = 0; t < T; t++) {
                float *row = s->wide + (size_t)t * qkv;
                const float *cos = m->cos + (size_t)s->pos[t] * (hd / 2), *sin = m->sin + (size_t)s->pos[t] * (hd / 2);
                rotate(row, cos, sin, m->heads + m->kv_heads, hd);
                memcpy(l->k + (size_t)s->slots[t] * kv_width, row + q_width, sizeof(float) * kv_width);
                memcpy(l->v + (size_t)s->slots[t] * kv_width, row + q_width + kv_width, sizeof(float) * kv_width);
            }
            float *scores = s->scores + (size_t)omp_get_thread_num() * (m->heads / m->kv_heads) * s->longest;
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < T * m->kv_heads; i++) attend(m, l, s, i / m->kv_heads, i % m->kv_heads, scores);
            linear(m->type, s->mix, q_width, l->o, q_width, H, T, s->x, H, 1);
#pragma omp for
            for (int t = 0; t < T; t++) rms_norm(s->x + (size_t)t * H, l->norm2, H, m->eps, s->norm + (size_t)t * H);
            linear(m->type, s->norm, H, l->gate_up, H, 2 * m->ffn, T, s->wide, 2 * (size_t)m->ffn, 0);
#pragma omp for
            for (int t = 0; t < T; t++) {
                const float *gate = s->wide + (size_t)t * 2 * m->ffn, *up = gate + m->ffn;
                float *out = s->mix + (size_t)t * m->ffn;
                for (int i = 0; i < m->ffn; i += 8) {
                    v8 g = *(const v8u *)(gate + i), x = -g;
                    x = select8(x > 87.0f, (v8){0} + 87.0f, x);
                    *(v8u *)(out + i) = g / (exp8(x) + 1.0f) * *(const v8u *)(up + i);
                }
            }
            linear(m->type, s->mix, m->ffn, l->down, m->ffn, H, T, s->x, H, 1);
        }
#pragma omp for
        for (int i = 0; i < s->sampled; i++) rms_norm(s->x + (size_t)s->sample[i] * H, m->norm, H, m->eps, s->norm + (size_t)i * H);
        linear(m->type, s->norm, H, m->head, H, (m->vocab + NR - 1) / NR * NR, s->sampled, s->logits, (m->vocab + NR - 1) / NR * NR, 0);
    }
}
