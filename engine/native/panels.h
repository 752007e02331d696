/* Weights in panels of 16 outputs, at four precisions, and the product of rows with them.
 *
 *   F32    [k][16] float
 *   BF16   [k / 2][16][2] bf16: a pair of inputs in a word, the even one in its lower half
 *   INT8   per group of 32 inputs: 16 halves d, then [8][16] words of 4 bytes q + 128; weight = q d
 *   INT4   per group of 32 inputs: 16 halves d, 16 halves m, then [4][16] words of 8 nibbles q; weight = q d + m
 *          (the first input of a word is its lowest part)
 *   INT4_BF16  the data of INT4; rows are rounded to bf16 and products summed in pairs by the processor's own instruction,
 *          where it has it: per group q x, then d (q x) + m (sum of x)
 *
 * An output is one chain of fused multiply-adds over the inputs, in order, from zero: its bits do not depend on how
 * many rows there are, nor on whether weights are unpacked in registers (few rows) or into a block that stays in the
 * first-level cache (many rows). */
#ifndef TAILSPAN_PANELS_H
#define TAILSPAN_PANELS_H
#include "vectors.h"

enum { F32, BF16, INT8, INT4, INT4_BF16 };
#ifdef __AVX512F__
#define MR 12           /* rows in a register tile: 24 accumulators of 32 registers */
#define PAIR(type) MR   /* up to so many rows two panels go side by side */
#else
#define MR 6 /* 12 accumulators of 16 registers */
#define PAIR(type) ((type) < INT8 ? 2 : 1)
#endif
#define FEW(type) ((type) < INT8 ? 6 : 4) /* up to so many rows weights are unpacked in registers: more spill them */
#define BLOCK 256 /* inputs unpacked at a time: 16 KiB a panel */
#define GROUP 32

struct matrix {
    const char *data;
    int32_t type, inputs, outputs; /* multiples of 16 */
};

INLINE size_t panel_bytes(int type, int inputs) {
    size_t groups = (size_t)(inputs + GROUP - 1) / GROUP;
    switch (type) {
        case F32: return (size_t)inputs * NR * 4;
        case BF16: return (size_t)inputs * NR * 2;
        case INT8: return groups * (NR * 2 + GROUP * NR);
        default: return groups * (NR * 4 + GROUP * NR / 2);
    }
}

/* the weights of np panels, input after input, each given to USE(k) as w[0 .. np * VP) */
#define EACH_INPUT(type, np, panel, stride, first, last, USE)                                                         \
    do {                                                                                                              \
        vf w[2 * VP];                                                                                                 \
        if ((type) == F32) {                                                                                          \
            for (int k = (first); k < (last); k++) {                                                                  \
                EACH(v, (np) * VP) w[v] = load((const float *)((panel) + v / VP * (stride)) + (size_t)k * NR + v % VP * VL);\
                EACH(v, (np) * VP) IN_REGISTER(w[v]);                                                                 \
                USE(k);                                                                                               \
            }                                                                                                         \
        } else if ((type) == BF16) {                                                                                  \
            for (int k = (first); k < (last); k += 2) {                                                               \
                vu both[2 * VP];                                                                                      \
                EACH(v, (np) * VP) both[v] = *(const vuu *)((panel) + v / VP * (stride) + (size_t)k * NR * 2 + v % VP * VL * 4);\
                EACH(v, (np) * VP) w[v] = (vf)(both[v] << 16);                                                        \
                USE(k);                                                                                               \
                EACH(v, (np) * VP) w[v] = (vf)(both[v] & 0xffff0000u);                                                \
                USE(k + 1);                                                                                           \
            }                                                                                                         \
        } else {                                                                                                      \
            const int bits = (type) == INT8 ? 8 : 4, per_word = 32 / bits, scales = (type) == INT8 ? NR * 2 : NR * 4; \
            for (int g = (first); g < (last); g += GROUP) {                                                           \
                const char *at = (panel) + (size_t)(g / GROUP) * (scales + GROUP / per_word * NR * 4);                \
                int end = g + GROUP < (last) ? g + GROUP : (last);                                                    \
                vf d[2 * VP], m[2 * VP];                                                                              \
                EACH(v, (np) * VP) {                                                                                  \
                    const uint16_t *scale = (const uint16_t *)(at + v / VP * (stride)) + v % VP * VL;                 \
                    d[v] = from_halves(scale), m[v] = (type) == INT8 ? d[v] * -128.0f : from_halves(scale + NR);      \
                }                                                                                                     \
                const char *word = at + scales;                                                                       \
                for (int k = g; k < end; k += per_word, word += NR * 4) {                                             \
                    vu q[2 * VP];                                                                                     \
                    EACH(v, (np) * VP) q[v] = *(const vuu *)(word + v / VP * (stride) + v % VP * VL * 4);             \
                    EACH(j, per_word) {                                                                               \
                        if (VP * (np) > 2) IN_MEMORY(m);                                                              \
                        EACH(v, (np) * VP) w[v] = __builtin_convertvector((vi)(q[v] & ((1u << bits) - 1)), vf) * d[v] + m[v];\
                        EACH(v, (np) * VP) q[v] >>= bits;                                                             \
                        USE(k + j);                                                                                   \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    } while (0)

/* out[row][0 .. 16 np) = (fresh ? 0 : out) + x[row][first .. last) . panels, for `rows` rows that are a constant */
INLINE void tile(const int type, const int rows, const int np, const float *x, size_t ldx, const char *panel, size_t stride,
                 int inputs, float *out, size_t ldo, int fresh) {
    vf sum[MR][2 * VP];
    EACH(r, rows) EACH(v, np * VP) sum[r][v] = fresh ? (vf){0} : load(out + r * ldo + v * VL);
#define ADD(k) EACH(r, rows) { vf s = splat(x[r * ldx + (k)]); EACH(v, np * VP) sum[r][v] += w[v] * s; }
    EACH_INPUT(type, np, panel, stride, 0, inputs, ADD);
#undef ADD
    EACH(r, rows) EACH(v, np * VP) store(out + r * ldo + v * VL, sum[r][v]);
}

typedef void tile_function(const float *x, size_t ldx, const char *panel, size_t stride, int inputs, float *out, size_t ldo, int fresh);
#define TILE(type, rows, np)                                                                                             \
    static void type##_##rows##_##np(const float *x, size_t ldx, const char *panel, size_t stride, int inputs, float *out,\
                                     size_t ldo, int fresh) {                                                         \
        tile(type, rows, np, x, ldx, panel, stride, inputs, out, ldo, fresh);                                         \
    }
#define TILES_OF_6(type, np) TILE(type, 1, np) TILE(type, 2, np) TILE(type, 3, np) TILE(type, 4, np) TILE(type, 5, np) TILE(type, 6, np)
#define TILES_TO_12(type, np) TILE(type, 7, np) TILE(type, 8, np) TILE(type, 9, np) TILE(type, 10, np) TILE(type, 11, np) TILE(type, 12, np)
#define NAMES_OF_6(type, np) type##_1_##np, type##_2_##np, type##_3_##np, type##_4_##np, type##_5_##np, type##_6_##np
#define NAMES_TO_12(type, np) type##_7_##np, type##_8_##np, type##_9_##np, type##_10_##np, type##_11_##np, type##_12_##np
#define OF_TYPE(type) TILES_OF_6(type, 1) TILES_OF_6(type, 2)
OF_TYPE(F32) OF_TYPE(BF16) OF_TYPE(INT8) OF_TYPE(INT4)
static tile_function *const few_tiles[4][2][6] = {
    {{NAMES_OF_6(F32, 1)}, {NAMES_OF_6(F32, 2)}},
    {{NAMES_OF_6(BF16, 1)}, {NAMES_OF_6(BF16, 2)}},
    {{NAMES_OF_6(INT8, 1)}, {NAMES_OF_6(INT8, 2)}},
    {{NAMES_OF_6(INT4, 1)}, {NAMES_OF_6(INT4, 2)}},
};
#if MR == 12
TILES_TO_12(F32, 1) TILES_TO_12(F32, 2)
static tile_function *const float_tiles[2][MR] = {{NAMES_OF_6(F32, 1), NAMES_TO_12(F32, 1)}, {NAMES_OF_6(F32, 2), NAMES_TO_12(F32, 2)}};
#else
static tile_function *const float_tiles[2][MR] = {{NAMES_OF_6(F32, 1)}, {NAMES_OF_6(F32, 2)}};
#endif

/* out (+)= x . panels of floats, np of them side by side (1 or 2), for any number of rows */
static void float_product(const float *x, size_t ldx, const char *panel, size_t stride, int np, int inputs, int rows, float *out,
                          size_t ldo, int fresh) {
    for (int r = 0, n; r < rows; r += n) {
        int left = rows - r;
        n = left > MR && left < MR + 3 ? (left + 1) / 2 : left < MR ? left : MR; /* no tile of one or two rows behind full ones */
        float_tiles[np - 1][n - 1](x + r * ldx, ldx, panel, stride, inputs, out + r * ldo, ldo, fresh);
    }
}
/* the weights of np panels, inputs first .. last, as floats: np blocks [last - first][16], BLOCK * 16 floats apart */
INLINE void unpack(const int type, const int np, const char *panel, size_t stride, int first, int last, float *out) {
#define KEEP(k) EACH(v, np * VP) store(out + v / VP * BLOCK * NR + (size_t)((k) - first) * NR + v % VP * VL, w[v])
    EACH_INPUT(type, np, panel, stride, first, last, KEEP);
#undef KEEP
}
static void unpack_panels(int type, const char *panel, size_t stride, int np, int first, int last, float *out) {
    for (int p = 0; p < np; p++, panel += stride, out += BLOCK * NR) {
        if (type == BF16) unpack(BF16, 1, panel, 0, first, last, out);
        else if (type == INT8) unpack(INT8, 1, panel, 0, first, last, out);
        else unpack(INT4, 1, panel, 0, first, last, out);
    }
}
/* A row of n floats rounded to bf16 lies in the room of the floats: a word holds inputs j and j + 4 of eight, as the
 * nibbles of a word of weights lie; the sums of its groups of 32 follow at n / 2.  count: 16 or 32 */
static void narrow_group(float *row, int n, int group, const float *x, int count) {
    uint32_t *words = (uint32_t *)row + group * (GROUP / 2);
    float rounded[GROUP], sum = 0;
    for (int i = 0; i < count; i += VL) {
        vf v = load(x + i);
        vu bits = (vu)v + 0x7fff + ((vu)v >> 16 & 1);
        store(rounded + i, choose(v == v, (vf)(bits & 0xffff0000u), (vf)((vu)v | 0x400000)));
    }
    for (int i = 0; i < count; i += 8)
        for (int j = 0; j < 4; j++) {
            uint32_t low, high;
            memcpy(&low, rounded + i + j, 4), memcpy(&high, rounded + i + j + 4, 4);
            words[i / 2 + j] = low >> 16 | (high & 0xffff0000u);
        }
    for (int i = 0; i < count; i++) sum += rounded[i];
    row[n / 2 + group] = sum;
}
INLINE vf dot_pairs(vf sum, vu a, vu b) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
    return sum + (vf)(a << 16) * (vf)(b << 16);
#endif
}
/* nibble q becomes the bf16 128 + q, which is exact; what that adds, 128 times the sum of x, goes into the last line */
INLINE void narrow_tile(const int rows, const int np, const float *x, size_t ldx, const char *panel, size_t stride, int inputs,
                        float *out, size_t ldo) {
    vf sum[6][2 * VP];
    EACH(r, rows) EACH(v, np * VP) sum[r][v] = (vf){0};
    for (int g = 0; g * GROUP < inputs; g++, panel += NR * 4 + GROUP * NR / 2) {
        int octets = (inputs - g * GROUP < GROUP ? inputs - g * GROUP : GROUP) / 8;
        vf part[6][2 * VP];
        EACH(r, rows) EACH(v, np * VP) part[r][v] = (vf){0};
        for (int i = 0; i < octets; i++) {
            vu q[2 * VP];
            EACH(v, np * VP) q[v] = *(const vuu *)(panel + v / VP * stride + NR * 4 + i * NR * 4 + v % VP * VL * 4);
            EACH(j, 4) {
                EACH(r, rows) {
                    uint32_t pair = ((const uint32_t *)(x + r * ldx))[g * (GROUP / 2) + i * 4 + j];
                    EACH(v, np * VP) part[r][v] = dot_pairs(part[r][v], (q[v] >> 4 * j & 0x000f000fu) | 0x43004300u, (vu){0} + pair);
                }
            }
        }
        EACH(v, np * VP) {
            const uint16_t *scale = (const uint16_t *)(panel + v / VP * stride) + v % VP * VL;
            vf d = from_halves(scale), m = from_halves(scale + NR) - d * 128.0f;
            EACH(r, rows) sum[r][v] += d * part[r][v] + m * splat(x[r * ldx + inputs / 2 + g]);
        }
    }
    EACH(r, rows) EACH(v, np * VP) store(out + r * ldo + v * VL, sum[r][v]);
}
static void narrow_product(const float *x, size_t ldx, const char *panel, size_t stride, int np, int inputs, int rows, float *out, size_t ldo) {
    for (int r = 0, n; r < rows; r += n) {
        n = rows - r < 6 ? rows - r : 6;
#define CASE(M) case M * 2: narrow_tile(M, 1, x + r * ldx, ldx, panel, stride, inputs, out + r * ldo, ldo); break; \
                case M * 2 + 1: narrow_tile(M, 2, x + r * ldx, ldx, panel, stride, inputs, out + r * ldo, ldo); break;
        switch (n * 2 + np - 1) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
    }
}
/* out[row][16 j ..] = x[row] . panel first + j, j < count.  block: 2 * BLOCK * 16 floats of the calling thread */
static void product(const struct matrix *w, int first, int count, const float *x, size_t ldx, int rows, float *out, size_t ldo,
                    float *block) {
    const size_t stride = panel_bytes(w->type, w->inputs);
    const char *panel = w->data + (size_t)first * stride;
    const int side_by_side = rows <= PAIR(w->type) || MR == 12 ? 2 : 1;
    for (int p = 0, np; p < count; p += np, panel += np * stride, out += np * NR) {
        np = count - p < side_by_side ? 1 : side_by_side;
        if (w->type == INT4_BF16) {
            narrow_product(x, ldx, panel, stride, np, w->inputs, rows, out, ldo);
            continue;
        }
        if (rows <= FEW(w->type)) {
            few_tiles[w->type][np - 1][rows - 1](x, ldx, panel, stride, w->inputs, out, ldo, 1);
            continue;
        }
        for (int k = 0; k < w->inputs; k += BLOCK) {
            int n = w->inputs - k < BLOCK ? w->inputs - k : BLOCK;
            const char *floats = panel + (size_t)k * NR * 4;
            size_t apart = stride;
            if (w->type != F32) {
                unpack_panels(w->type, panel, stride, np, k, k + n, block);
                floats = (const char *)block, apart = BLOCK * NR * 4;
            }
            float_product(x + k, ldx, floats, apart, np, n, rows, out, ldo, k == 0);
        }
    }
}
/* one output's weights as floats: a row of the embedding */
static void unpack_output(const struct matrix *w, int output, float *out) {
    const size_t stride = panel_bytes(w->type, w->inputs);
    const char *panel = w->data + (size_t)(output / NR) * stride;
    const int lane = output % NR;
    for (int k = 0; k < w->inputs; k++) {
        if (w->type == F32) out[k] = ((const float *)panel)[(size_t)k * NR + lane];
        else if (w->type == BF16) {
            uint32_t bits = (uint32_t)((const uint16_t *)panel)[((size_t)(k / 2) * NR + lane) * 2 + k % 2] << 16;
            memcpy(out + k, &bits, 4);
        } else if (w->type == INT8) {
            const char *at = panel + (size_t)(k / GROUP) * (NR * 2 + GROUP * NR);
            uint32_t word = ((const uint32_t *)(at + NR * 2))[k % GROUP / 4 * NR + lane];
            out[k] = (float)((int)(word >> k % 4 * 8 & 255) - 128) * from_half(((const uint16_t *)at)[lane]);
        } else {
            const char *at = panel + (size_t)(k / GROUP) * (NR * 4 + GROUP / 8 * NR * 4);
            uint32_t word = ((const uint32_t *)(at + NR * 4))[k % GROUP / 8 * NR + lane];
            float d = from_half(((const uint16_t *)at)[lane]), m = from_half(((const uint16_t *)at)[NR + lane]);
            out[k] = (float)(word >> k % 8 * 4 & 15) * d + m;
        }
    }
}
#endif
