/* From rows of weights to panels (panels.h).  Scales are those of GGUF's Q8_0 and Q4_1, rounded to halves as there:
 * weights that came from such a file come out as they went in. */
#ifndef TAILSPAN_PACK_H
#define TAILSPAN_PACK_H
#include "panels.h"

/* to the nearest half, ties to even */
static uint16_t to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (fabsf(x) >= 65520.0f) return sign | 0x7c00;
    if (fabsf(x) < 0x1p-14f) return sign | (uint16_t)lrintf(fabsf(x) * 0x1p24f);
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - (112u << 23)) >> 13);
}
/* q of a weight: the nearest of low .. high, 0 for a group that is all the same */
static int level(float x, float d, int low, int high) {
    float q = d == 0 ? 0 : rintf(x / d);
    return !(q > (float)low) ? low : q > (float)high ? high : (int)q;
}
/* a scale for the whole group that is not finite when a weight is not, so that what is computed with it is not either */
static uint16_t scale_of(const float *x, int count, float d) {
    float bad = 0;
    for (int i = 0; i < count; i++) bad += x[i] * 0.0f;
    return to_half(d + bad);
}
/* one group of one output: count weights at x into the lane of a block of panel; returns whether nothing was lost */
static int pack_int8(const float *x, int count, int lane, char *block) {
    uint32_t *words = (uint32_t *)(block + NR * 2) + lane;
    float top = 0;
    for (int i = 0; i < count; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
    uint16_t half = scale_of(x, count, top / 127.0f);
    float d = from_half(half);
    int exact = 1;
    ((uint16_t *)block)[lane] = half;
    for (int i = 0; i < count; i++) {
        int q = level(x[i], d, -127, 127);
        words[i / 4 * NR] |= (uint32_t)(q + 128) << i % 4 * 8;
        exact &= (float)q * d == x[i];
    }
    return exact;
}
static int pack_int4(const float *x, int count, int lane, char *block) {
    uint32_t *words = (uint32_t *)(block + NR * 4) + lane;
    float low = x[0], high = x[0];
    for (int i = 1; i < count; i++) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    uint16_t half_d = scale_of(x, count, (high - low) / 15.0f), half_m = to_half(low);
    float d = from_half(half_d), m = from_half(half_m);
    int exact = 1;
    ((uint16_t *)block)[lane] = half_d, ((uint16_t *)block)[NR + lane] = half_m;
    for (int i = 0; i < count; i++) {
        int q = level(x[i] - m, d, 0, 15);
        words[i / 8 * NR] |= (uint32_t)q << i % 8 * 4;
        exact &= (float)q * d + m == x[i];
    }
    return exact;
}
/* weights [outputs][inputs] -> out, zeros at first, of panel_bytes(...) for every 16 outputs; returns whether nothing was lost */
static int pack_panels(int type, const float *weights, int outputs, int inputs, char *out) {
    const size_t stride = panel_bytes(type, inputs);
    int exact = 1;
    for (int n = 0; n < outputs; n++) {
        const float *x = weights + (size_t)n * inputs;
        char *panel = out + (size_t)(n / NR) * stride;
        const int lane = n % NR;
        if (type == F32) {
            for (int k = 0; k < inputs; k++) ((float *)panel)[(size_t)k * NR + lane] = x[k];
        } else if (type == BF16) {
            for (int k = 0; k < inputs; k++) {
                uint32_t bits;
                memcpy(&bits, x + k, 4);
                exact &= !(bits & 0xffff);
                if (x[k] == x[k]) bits += 0x7fff + (bits >> 16 & 1);
                else bits |= 0x400000;
                ((uint16_t *)panel)[((size_t)(k / 2) * NR + lane) * 2 + k % 2] = (uint16_t)(bits >> 16);
            }
        } else {
            const size_t block = type == INT8 ? NR * 2 + GROUP * NR : NR * 4 + GROUP * NR / 2;
            for (int k = 0; k < inputs; k += GROUP, panel += block) {
                int count = inputs - k < GROUP ? inputs - k : GROUP;
                exact &= type == INT8 ? pack_int8(x + k, count, lane, panel) : pack_int4(x + k, count, lane, panel);
            }
        }
    }
    return exact;
}
#endif
