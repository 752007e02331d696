/* One step of a Llama on the CPU, in one call: no interpreter, no lock and no temporary between its operations.
 *
 * Every output element is computed in one fixed order that depends on its own row alone: a row's bits are the same
 * whatever else is in the batch, however its prompt was cut into chunks, cached or not.
 *
 *   weights   panels of 16 outputs (panels.h); gate and up alternate, panel by panel
 *   kv        pages of a multiple of 16 slots; 16 slots hold, per KV head, K as [head size][16 slots] and V as
 *             [head size / 16][16 slots][16]: both are panels, and attention is two products with them
 *   rows      tokens of the step; row t belongs to sequence seq[t] and attends to its first pos[t] + 1 tokens
 *   phases    of a layer: (norm) qkv + rotation + write to the cache, attention, output projection, (norm) gate and up,
 *             down; few rows are normalised by each thread for itself, many in a phase of their own (team.h) */
#include "pack.h"
#include "team.h"

#define SELF_NORM 16 /* up to so many rows each thread normalises all of them */
#define HEAD_ROWS 24 /* query rows (tokens times heads of a group) that share one pass over K and V */
enum { EMBED, NORM_1, QKV, ATTEND, OUTPUT, NORM_2, GATE_UP, DOWN, NORM_LAST, HEAD, N_PHASES };

struct layer {
    const float *norm1, *norm2;
    struct matrix qkv, o, gate_up, down;
    float *k, *v;
};
struct model {
    int32_t n_layers, hidden, ffn, heads, kv_heads, head_dim, page;
    float eps, scale;
    const float *norm, *cos, *sin; /* cos, sin: [position][head_dim / 2] */
    struct matrix embedding, head;
    const struct layer *layers;
};
struct block { /* up to HEAD_ROWS / group consecutive rows of one sequence */
    int32_t row, n;
};
struct step {
    int32_t rows, sampled, table_width, blocks, longest; /* longest: tokens of the longest context, up to a multiple of 16 */
    const int32_t *ids, *pos, *seq;                      /* [rows] */
    const int64_t *slots;                                /* [rows], where the row's K and V go */
    const int32_t *tables;                               /* [sequences][table_width] pages */
    const int32_t *sample;                               /* [sampled] rows whose logits are wanted */
    const struct block *block;                           /* [blocks] */
    float *logits;                                       /* [sampled][vocabulary, up to a multiple of 16] */
    float *x, *norm, *q, *mix; /* [rows] of hidden, hidden, heads * head_dim, max(heads * head_dim, ffn) */
    float *own;                /* [threads][own_floats(...)] */
    const struct model *model;
};

static int group_of(const struct model *m) { return m->heads / m->kv_heads; }
static int most(int a, int b) { return a > b ? a : b; }
static int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* what a thread has for itself: rows that it normalised, a block of weights, a strip of sums, scores and sums of attention */
static size_t strip_width(const struct model *m) { return (size_t)most(m->head_dim, 8 * NR); }
static size_t attention_rows(const struct model *m) { return (size_t)most(HEAD_ROWS, group_of(m)); }
size_t tailspan_own_floats(const struct model *m, int rows, int longest) {
    return NR + 2 * BLOCK * NR + (size_t)SELF_NORM * m->hidden + rows * strip_width(m) + attention_rows(m) * (size_t)(longest + 2 * m->head_dim);
}
struct own {
    float *normed_phase, *normed, *block, *strip, *scores, *q, *sums;
};
static struct own own_of(const struct step *s, int thread) {
    const struct model *m = s->model;
    struct own o;
    o.normed_phase = s->own + (size_t)thread * tailspan_own_floats(m, most(s->rows, s->sampled), s->longest);
    o.block = o.normed_phase + NR;
    o.normed = o.block + 2 * BLOCK * NR;
    o.strip = o.normed + (size_t)SELF_NORM * m->hidden;
    o.scores = o.strip + most(s->rows, s->sampled) * strip_width(m);
    o.q = o.scores + attention_rows(m) * s->longest;
    o.sums = o.q + attention_rows(m) * m->head_dim;
    return o;
}

/* what the products with w take as a row: floats, or rounded to bf16.  count: 16 or 32 of them, at a multiple of 32 */
static void put(const struct matrix *w, float *row, int at, const float *x, int count) {
    if (w->type == INT4_BF16) narrow_group(row, w->inputs, at / GROUP, x, count);
    else memcpy(row + at, x, sizeof(float) * (size_t)count);
}
/* a row, normalised, for the products with `next` */
static void rms_norm(const float *x, const float *weight, int n, float eps, const struct matrix *next, float *out) {
    float r = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps), some[GROUP];
    for (int at = 0; at < n; at += GROUP) {
        int count = n - at < GROUP ? n - at : GROUP;
        for (int i = 0; i < count; i += VL) store(some + i, load(x + at + i) * r * load(weight + at + i));
        put(next, out, at, some, count);
    }
}
/* rows of x, normalised: by this thread, once a phase, when they are few */
static const float *normed(const struct step *s, int phase, const float *weight, const struct matrix *next, int rows,
                           const int32_t *which, struct own *o) {
    const int H = s->model->hidden;
    if (rows > SELF_NORM) return s->norm;
    if (*o->normed_phase != (float)phase) {
        for (int i = 0; i < rows; i++)
            rms_norm(s->x + (size_t)(which ? which[i] : i) * H, weight, H, s->model->eps, next, o->normed + (size_t)i * H);
        *o->normed_phase = (float)phase;
    }
    return o->normed;
}

static void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i], x[i + half] = b * cos[i] + a * sin[i];
    }
}
/* one head of q, k or v for all rows: rotated, then kept in q or in the cache */
static void qkv_head(const struct step *s, const struct layer *l, int head, const float *x, struct own *o) {
    const struct model *m = s->model;
    const int hd = m->head_dim, half = hd / 2, kv = head - m->heads, width = m->kv_heads * hd * NR;
    product(&l->qkv, head * hd / NR, hd / NR, x, (size_t)m->hidden, s->rows, o->strip, (size_t)hd, o->block);
    for (int t = 0; t < s->rows; t++) {
        float *y = o->strip + (size_t)t * hd;
        size_t at = (size_t)(s->slots[t] / NR) * width, slot = (size_t)(s->slots[t] % NR);
        if (kv < m->kv_heads) rotate(y, m->cos + (size_t)s->pos[t] * half, m->sin + (size_t)s->pos[t] * half, half);
        if (kv < 0) memcpy(s->q + ((size_t)t * m->heads + head) * hd, y, sizeof(float) * (size_t)hd);
        else if (kv < m->kv_heads)
            for (int i = 0; i < hd; i++) l->k[at + ((size_t)kv * hd + i) * NR + slot] = y[i];
        else
            for (int i = 0; i < hd; i += NR)
                memcpy(l->v + at + ((size_t)(kv - m->kv_heads) * hd + i) * NR + slot * NR, y + i, sizeof(float) * NR);
    }
}

/* weights of one query row over its first n tokens, from its scores; returns 1 / their sum.  Lanes past n become 0. */
static float softmax(float *score, int n) {
    const int padded = (n + NR - 1) / NR * NR;
    for (int t = n; t < padded; t++) score[t] = -INFINITY;
    vf highest = load(score);
    for (int t = VL; t < padded; t += VL) {
        vf x = load(score + t);
        highest = choose(x > highest, x, highest);
    }
    float top = highest[0];
    for (int i = 1; i < VL; i++) top = highest[i] > top ? highest[i] : top;
    vf sum = {0};
    for (int t = 0; t < padded; t += VL) {
        vf x = load(score + t) - top, y = exponential(x);
        y = choose(x < -87.0f, (vf){0}, y);
        store(score + t, y), sum += y;
    }
    return 1.0f / sum_lanes(sum);
}
/* one block of rows, one KV head: the block's query rows over their contexts, 16 tokens after 16 tokens */
static void attend(const struct step *s, const struct layer *l, const struct block *b, int head, struct own *o) {
    const struct model *m = s->model;
    const int hd = m->head_dim, group = group_of(m), rows = b->n * group, first = s->pos[b->row] + 1, last = first + b->n - 1;
    const size_t width = (size_t)m->kv_heads * hd * NR, at = (size_t)head * hd * NR, ld = (size_t)s->longest;
    const int32_t *table = s->tables + (size_t)s->seq[b->row] * s->table_width;
    const int per_page = m->page / NR;
#define SIXTEEN(cache, t) ((cache) + ((size_t)table[(t) / m->page] * per_page + (t) % m->page / NR) * width + at)
    for (int i = 0; i < b->n; i++) {
        const float *from = s->q + ((size_t)(b->row + i) * m->heads + (size_t)head * group) * hd;
        for (int j = 0; j < group * hd; j += VL) store(o->q + (size_t)i * group * hd + j, load(from + j) * m->scale);
    }
    for (int t = 0; t < last; t += NR) float_product(o->q, (size_t)hd, (const char *)SIXTEEN(l->k, t), 0, 1, hd, rows, o->scores + t, ld, 1);
    float inverse[HEAD_ROWS > 16 ? HEAD_ROWS : 16];
    for (int r = 0; r < rows; r++) inverse[r] = softmax(o->scores + r * ld, first + r / group);
    memset(o->sums, 0, sizeof(float) * (size_t)(rows * hd));
    int t = 0;
    const int pairs = hd / NR / 2, single = hd / NR % 2;
    const size_t panel = NR * NR * sizeof(float);
#define ADD_VALUES(r, n, count)                                                                                              \
    do {                                                                                                                     \
        const char *v = (const char *)SIXTEEN(l->v, t);                                                                      \
        const float *p = o->scores + (r) * ld + t;                                                                           \
        float *out = o->sums + (size_t)(r) * hd;                                                                             \
        for (int j = 0; j < pairs; j++) float_product(p, ld, v + 2 * j * panel, panel, 2, count, n, out + 2 * j * NR, (size_t)hd, 0); \
        if (single) float_product(p, ld, v + 2 * pairs * panel, 0, 1, count, n, out + 2 * pairs * NR, (size_t)hd, 0);        \
    } while (0)
    for (; t + NR <= first; t += NR) ADD_VALUES(0, rows, NR); /* whole for all rows of the block */
    for (; t < last; t += NR) /* what lies beyond a row's own tokens may hold anything, so each row stops there */
        for (int i = t < first ? 0 : t - first + 1; i < b->n; i++) {
            int count = first + i - t < NR ? first + i - t : NR;
            ADD_VALUES(i * group, group, count);
        }
    for (int i = 0; i < b->n; i++) {
        float *to = s->mix + (size_t)(b->row + i) * m->heads * hd, *from = o->sums + (size_t)i * group * hd;
        for (int j = 0; j < group * hd; j += VL) store(from + j, load(from + j) * inverse[i * group + j / hd]);
        for (int j = 0, n; j < group * hd; j += n) {
            n = group * hd - j < GROUP ? group * hd - j : GROUP;
            put(&l->o, to, head * group * hd + j, from + j, n);
        }
    }
}

/* strips of `panels` panels in a product; a strip is a task */
static int strips(const struct matrix *w, int panels) { return ceil_div(w->outputs / NR, panels); }
/* x += rows . w, one strip */
static void add_strip(const struct step *s, const struct matrix *w, const float *rows, size_t ld, int strip, int panels, struct own *o) {
    int first = strip * panels, n = w->outputs / NR - first < panels ? w->outputs / NR - first : panels;
    product(w, first, n, rows, ld, s->rows, o->strip, (size_t)n * NR, o->block);
    for (int t = 0; t < s->rows; t++) {
        float *x = s->x + (size_t)t * s->model->hidden + first * NR;
        for (int i = 0; i < n * NR; i += VL) store(x + i, load(x + i) + load(o->strip + (size_t)t * n * NR + i));
    }
}
static void gate_up_strip(const struct step *s, const struct layer *l, int strip, const float *x, struct own *o) {
    const struct model *m = s->model;
    int first = strip * 8, all = l->gate_up.outputs / NR, n = all - first < 8 ? all - first : 8;
    product(&l->gate_up, first, n, x, (size_t)m->hidden, s->rows, o->strip, (size_t)n * NR, o->block);
    for (int t = 0; t < s->rows; t++) {
        float some[4 * NR];
        for (int p = 0; p < n; p += 2)
            for (int i = 0; i < NR; i += VL) {
                const float *gate = o->strip + ((size_t)t * n + p) * NR + i;
                vf g = load(gate), e = -g;
                e = choose(e > 87.0f, splat(87.0f), e);
                store(some + p / 2 * NR + i, g / (exponential(e) + 1.0f) * load(gate + NR));
            }
        for (int i = 0; i < n / 2 * NR; i += GROUP)
            put(&l->down, s->mix + (size_t)t * m->ffn, first / 2 * NR + i, some + i, n / 2 * NR - i < GROUP ? n / 2 * NR - i : GROUP);
    }
}

/* phases in the order of the step: embedding, then those of each layer, then the last norm and the head */
static int kind_of(const struct step *s, int phase, int *layer) {
    int per_layer = DOWN - EMBED, n = s->model->n_layers;
    if (phase == 0) return EMBED;
    *layer = (phase - 1) / per_layer;
    return *layer < n ? NORM_1 + (phase - 1) % per_layer : NORM_LAST + (phase - 1 - n * per_layer);
}
static int tasks_of(void *of, int phase) {
    const struct step *s = of;
    const struct model *m = s->model;
    int layer = 0, kind = kind_of(s, phase, &layer);
    const struct layer *l = m->layers + layer;
    switch (kind) {
        case EMBED: return ceil_div(s->rows, 8);
        case NORM_1:
        case NORM_2: return s->rows > SELF_NORM ? ceil_div(s->rows, 8) : 0;
        case QKV: return m->heads + 2 * m->kv_heads;
        case ATTEND: return s->blocks * m->kv_heads;
        case OUTPUT: return strips(&l->o, 2);
        case GATE_UP: return strips(&l->gate_up, 8);
        case DOWN: return strips(&l->down, 2);
        case NORM_LAST: return s->sampled > SELF_NORM ? ceil_div(s->sampled, 8) : 0;
        case HEAD: return s->sampled ? strips(&m->head, 8) : 0;
        default: return -1;
    }
}
static void norm_rows(const struct step *s, const float *weight, const struct matrix *next, int task, int rows, const int32_t *which) {
    const int H = s->model->hidden;
    for (int i = task * 8; i < rows && i < task * 8 + 8; i++)
        rms_norm(s->x + (size_t)(which ? which[i] : i) * H, weight, H, s->model->eps, next, s->norm + (size_t)i * H);
}
static void run_task(void *of, int phase, int task, int thread) {
    const struct step *s = of;
    const struct model *m = s->model;
    struct own o = own_of(s, thread);
    int layer = 0, kind = kind_of(s, phase, &layer);
    const struct layer *l = m->layers + layer;
    switch (kind) {
        case EMBED:
            for (int t = task * 8; t < s->rows && t < task * 8 + 8; t++) unpack_output(&m->embedding, s->ids[t], s->x + (size_t)t * m->hidden);
            break;
        case NORM_1: norm_rows(s, l->norm1, &l->qkv, task, s->rows, NULL); break;
        case QKV: qkv_head(s, l, task, normed(s, phase, l->norm1, &l->qkv, s->rows, NULL, &o), &o); break;
        case ATTEND: attend(s, l, s->block + (s->blocks - 1 - task / m->kv_heads), task % m->kv_heads, &o); break;
        case OUTPUT: add_strip(s, &l->o, s->mix, (size_t)(m->heads * m->head_dim), task, 2, &o); break;
        case NORM_2: norm_rows(s, l->norm2, &l->gate_up, task, s->rows, NULL); break;
        case GATE_UP: gate_up_strip(s, l, task, normed(s, phase, l->norm2, &l->gate_up, s->rows, NULL, &o), &o); break;
        case DOWN: add_strip(s, &l->down, s->mix, (size_t)m->ffn, task, 2, &o); break;
        case NORM_LAST: norm_rows(s, m->norm, &m->head, task, s->sampled, s->sample); break;
        case HEAD: {
            const float *x = normed(s, phase, m->norm, &m->head, s->sampled, s->sample, &o);
            int first = task * 8, n = m->head.outputs / NR - first < 8 ? m->head.outputs / NR - first : 8;
            product(&m->head, first, n, x, (size_t)m->hidden, s->sampled, s->logits + first * NR, (size_t)m->head.outputs, o.block);
        }
    }
}

size_t tailspan_panel_bytes(int type, int inputs) { return panel_bytes(type, inputs); }
int tailspan_pack(int type, const float *weights, int outputs, int inputs, char *out) { return pack_panels(type, weights, outputs, inputs, out); }
/* does the processor multiply pairs of bf16? */
int tailspan_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}
int tailspan_query_rows(void) { return HEAD_ROWS; }
struct team *tailspan_start(int threads) { return team_start(threads); }
void tailspan_end(struct team *team) { team_end(team); }
void tailspan_forward(struct team *team, const struct step *s) {
    for (int i = 0; i < team->threads; i++) *own_of(s, i).normed_phase = -1;
    team_run(team, (struct job){tasks_of, run_task, (void *)s});
}
