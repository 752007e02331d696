/* Vectors as wide as the processor has them, in GCC's vector extensions: the compiler makes AVX2, AVX-512 or NEON of
 * them (clang takes them too).  Everything here works lane by lane, in one fixed order. */
#ifndef TAILSPAN_VECTORS_H
#define TAILSPAN_VECTORS_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define VL 16 /* floats in a vector */
#else
#define VL 8
#endif
#define NR 16        /* outputs in a panel of weights */
#define VP (NR / VL) /* vectors in a row of a panel */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint32_t vuu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vhu __attribute__((vector_size(VL * 2), aligned(2), may_alias));

/* a value that must stay in a register (not be read from memory for each use), or in memory (not push others out) */
#ifdef __AVX__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#define IN_MEMORY(x) __asm__("" : "+m"(x))
#else
#define IN_REGISTER(x) ((void)0)
#define IN_MEMORY(x) ((void)0)
#endif

#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf x) { *(vfu *)p = x; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* the lanes added in halves: the order is fixed for a machine */
INLINE float sum_lanes(vf s) {
    float lane[VL];
    memcpy(lane, &s, sizeof s);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}
static float dot(const float *a, const float *b, int n) { /* n: a multiple of 16 */
    vf s = {0};
    for (int i = 0; i < n; i += VL) s += load(a + i) * load(b + i);
    return sum_lanes(s);
}
/* halves to floats, exactly: exponent and mantissa move 13 bits up, and 2^112 makes up for the other bias */
INLINE vf from_halves(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vu h = __builtin_convertvector(*(const vhu *)p, vu);
    vf magnitude = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)magnitude | (h & 0x8000) << 16);
#endif
}
INLINE float from_half(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float x;
    memcpy(&x, &bits, 4);
    x *= 0x1p112f;
    return h & 0x8000 ? -x : x;
}
/* e^x for x <= 88, error below 2 ulp: 2^n * polynomial on [-ln2/2, ln2/2] (the minimax of Cephes' expf) */
INLINE vf exponential(vf x) {
    x = choose(x < -87.0f, splat(-87.0f), x);
    vf n = x * 1.44269504088896341f + 12582912.0f; /* adds 1.5 * 2^23: rounds to an integer */
    vi e = (vi)n - 0x4B400000;
    n -= 12582912.0f;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f, y = y * x + 8.3334519073e-3f, y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f, y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return y * (vf)((e + 127) << 23);
}
#endif
