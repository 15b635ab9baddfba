// The spline tokenizer for GPUs: one thread a window, three kernels that follow each other (see gpu.py, which calls
// them, and reference.py, which they follow). No thread waits for another but in `turn`, so that the same source, as
// plain C++, is tested on the CPU.
//
//   turn   brings the samples of many windows into the order in which the threads read them
//   place  Algorithm 1: knots; compiled where ORDER is given, how often the samples are differentiated
//   fit    least squares and the condition of the fit; compiled where DEGREE is given
//
// Constants: REAL (float or double) of the samples and of the results, REGULAR (0 or 1), ORDER, DEGREE. With them the
// short loops unroll and the small arrays live in registers. Inside, the arithmetic is float64: a Gram matrix squares
// the condition of the fit.
//
// Work arrays are (rows, count) with the windows along the last axis, so that neighbouring threads touch neighbouring
// numbers.

constexpr double ENDLESS = 1.7976931348623157e308;  // the largest float64

constexpr int PACK = 16 / sizeof(REAL);  // samples that one load brings

// Samples i ... i + PACK - 1 of a window. All windows' first packs come first, then all windows' second ones.
struct alignas(16) Pack {
    REAL sample[PACK];
};

__device__ __forceinline__ double largest_of(double a, double b) { return a < b ? b : a; }

__device__ __forceinline__ double least_of(double a, double b) { return b < a ? b : a; }

#if !defined(ORDER) && !defined(DEGREE)

// Window w has the samples[starts[w] + i * step], or samples[w * row + i * step] where starts is null. What lies past
// its end in its last pack is 0. Blocks of (32, 8) threads; each turns 32 samples of 32 windows by way of shared memory,
// so that both its reads and its writes are of neighbouring numbers.
extern "C" __global__ void turn(const REAL* __restrict__ samples, const long long* __restrict__ starts, int row,
                                int step, int m, int count, REAL* __restrict__ turned) {
    __shared__ REAL tile[32][32 + PACK];
    const int first_window = blockIdx.x * 32, first_sample = blockIdx.y * 32;
    for (int k = threadIdx.y; k < 32; k += 8) {
        const int w = first_window + k, i = first_sample + threadIdx.x;
        REAL value = 0;
        if (w < count && i < m) {
            const long long start = starts ? starts[w] : (long long)w * row;
            value = samples[start + (long long)i * step];
        }
        tile[k][threadIdx.x] = value;
    }
    __syncthreads();
    for (int k = threadIdx.y; k < 32; k += 8) {
        const int place = k * 32 + threadIdx.x;  // among the 32 * 32 numbers in their new order
        const int pack = place / (32 * PACK), w = place / PACK % 32, e = place % PACK;
        const int i = first_sample + pack * PACK;
        if (first_window + w < count && i < m) {
            turned[((long long)(i / PACK) * count + first_window + w) * PACK + e] = tile[w][pack * PACK + e];
        }
    }
}

#endif

#ifdef ORDER

#define ROUNDING (4 * 2.220446049250313e-16)  // spec.py has the meaning of these
#define SMALLEST 1e-290
#define FEATURE_FLOOR 1e-6
#define LONG 4.0

// The ORDER-th derivative as a chain of ORDER stages, each one sample behind the one before it: a sample goes in, the
// derivative ORDER samples earlier comes out. The same operations as reference.gradient; but on a regular grid each
// stage leaves out its factor 1/2, which changes no digit.
struct Derivative {
    double before[ORDER + 1];  // per stage: the number that came in last,
    double earlier[ORDER + 1];  // and the one before that; on an irregular grid the slope between the two
    double at[ORDER + 2];  // on an irregular grid: the positions of the latest samples

    __device__ __forceinline__ void inner(double& value) {
#pragma unroll
        for (int k = 0; k < ORDER; k++) {
            const double difference = value - earlier[k];
            earlier[k] = before[k];
            before[k] = value;
            value = difference;
        }
    }

    __device__ __forceinline__ void anywhere(double& value, int time, int m) {
#pragma unroll
        for (int k = 0; k < ORDER; k++) {
            const int i = time - k - 1;  // what this stage gives out
            double difference = value - earlier[k];
            if (i == 0) difference = 2 * (value - before[k]);
            if (i == m - 1) difference = 2 * (before[k] - earlier[k]);
            earlier[k] = before[k];
            before[k] = value;
            value = difference;
        }
    }

    __device__ __forceinline__ void irregular(double& value, double x, int time, int m) {
#pragma unroll
        for (int k = ORDER + 1; k > 0; k--) at[k] = at[k - 1];
        at[0] = x;
#pragma unroll
        for (int k = 0; k < ORDER; k++) {
            const int i = time - k - 1;
            const double h0 = at[k + 1] - at[k + 2 <= ORDER + 1 ? k + 2 : k + 1], h1 = at[k] - at[k + 1];
            const double slope = (value - before[k]) / h1;
            double gradient = (h0 * slope + h1 * earlier[k]) / (h0 + h1);
            if (i == 0) gradient = slope;
            if (i == m - 1) gradient = earlier[k];
            earlier[k] = slope;
            before[k] = value;
            value = gradient;
        }
    }
};

// Where a window's samples are, and all that calls see(y_i) for each of them and use(i, y^(ORDER)_i) in turn.
struct Window {
    const Pack* y;
    const double* x;
    int count, xstep, m;

    __device__ __forceinline__ double position(int i) const {
        return REGULAR ? (double)i : x[(long long)i * xstep];
    }

    template <class See, class Use>
    __device__ __forceinline__ void stream(See see, Use use) const {
        if (ORDER == 0) {
            for (int i = 0; i < m; i++) use(i, 1.0);
            return;
        }
        Derivative derivative;
#pragma unroll
        for (int k = 0; k < ORDER; k++) derivative.before[k] = derivative.earlier[k] = derivative.at[k] = 0.0;
        derivative.at[ORDER] = derivative.at[ORDER + 1] = 0.0;
        const Pack* next = y;
        Pack coming = *next;
        for (int begin = 0; begin < m + ORDER; begin += PACK) {
            Pack pack = coming;
            next += count;
            if (begin + PACK < m) coming = *next;
            if (REGULAR && begin > ORDER && begin + PACK <= m) {
#pragma unroll
                for (int e = 0; e < PACK; e++) {
                    double value = pack.sample[e];
                    see(value);
                    derivative.inner(value);
                    use(begin + e - ORDER, value);
                }
                continue;
            }
#pragma unroll 1
            for (int e = 0; e < PACK; e++) {
                const int time = begin + e;
                double value = pack.sample[0];
#pragma unroll
                for (int k = 1; k < PACK; k++) pack.sample[k - 1] = pack.sample[k];
                if (time < m) see(value);
                if (REGULAR)
                    derivative.anywhere(value, time, m);
                else
                    derivative.irregular(value, time < m ? position(time) : 0.0, time, m);
                if (time >= ORDER && time < m + ORDER) use(time - ORDER, value);
            }
        }
    }
};

// v^(1 / ORDER) for v of ordinary size. r ~ v^(-1 / ORDER) is guessed in float32, to about 1e-6; with h = 1 - v r^ORDER
// the series of (1 - h)^(-1 / ORDER) to the second power of h mends it to rounding.
__device__ __forceinline__ double root(double v) {
    if (ORDER <= 1) return v;
    const float guess = ORDER == 2 ? rsqrtf((float)v) : exp2f(__log2f((float)v) * (-1.0f / (ORDER ? ORDER : 1)));
    double r = guess, power = r;
#pragma unroll
    for (int k = 2; k < ORDER; k++) power *= r;
    const double s = 1.0 / (ORDER ? ORDER : 1), h = 1.0 - v * power * r;
    r += r * h * (s + h * (0.5 * s * (s + 1.0)));
    power = r;
#pragma unroll
    for (int k = 2; k < ORDER; k++) power *= r;
    return v * power;
}

// Algorithm 1; see reference._place. Positions x: window w's i-th is x[w * xrow + i * xstep]. Knots go to
// t (n + degree + 1, count); work holds 3 n rows more.
extern "C" __global__ void __launch_bounds__(128)
    place(const Pack* __restrict__ samples, const double* __restrict__ x, int xrow, int xstep, int count, int m, int n,
          int degree, int paper, double clip_factor, double gap, double recency, double* __restrict__ t,
          double* __restrict__ work) {
    const int w = blockIdx.x * blockDim.x + threadIdx.x;
    if (w >= count) return;
    const Window window = {samples + w, REGULAR ? x : x + (long long)w * xrow, count, xstep, m};
    const int k_int = n - degree - 1;
    const double start = window.position(0), length = window.position(m - 1) - start;
    const auto ignore = [](double) {};
    t += w;
    work += w;
    for (int j = 0; j <= degree; j++) {
        t[(long long)j * count] = start;
        t[(long long)(n + j) * count] = start + length;
    }
    double* interior = t + (long long)(degree + 1) * count;

    // Lines 1-6: the mean of |y^(ORDER)|, and whether there is one to speak of.
    double size = 0.0, bend = 0.0;
    if (ORDER > 0) {
        window.stream([&](double y) { size += fabs(y); }, [&](int, double dy) { bend += fabs(dy); });
    }
    const double real_bend = REGULAR ? bend / (1 << ORDER) : bend;
    const bool adaptive = ORDER > 0 && real_bend > largest_of(ROUNDING * size, SMALLEST * m);
    const double scale = adaptive ? m / bend : 0.0;
    const auto feature = [&](double dy) { return adaptive ? root(fabs(dy) * scale + FEATURE_FLOOR) : 1.0; };

    // Lines 7-10: the mass of the interval that ends at sample i, times 2, which cancels; and with more weight for what
    // is recent.
    const bool recent = recency != 1.0;
    const double rate = recent ? log(recency) / length : 0.0, ratio = recent && REGULAR ? exp(rate) : 1.0;
    const double first_weight = recent && REGULAR ? exp(-0.5 * rate) : 1.0;
    double previous = 0.0, weight = 1.0, cap = ENDLESS;
    const auto unclipped = [&](int i, double phi) {
        const double both = previous + phi;
        return REGULAR ? both : both * (window.position(i) - window.position(i - 1));
    };
    const auto mass = [&](int i, double phi) {
        double omega = least_of(unclipped(i, phi), cap);
        if (recent) {
            if (REGULAR) {
                weight *= ratio;
            } else {
                weight = exp(rate * (0.5 * (window.position(i - 1) + window.position(i)) - start));
            }
            omega *= weight;
        }
        return omega;
    };

    double total = 0.0;
    if (adaptive) {
        window.stream(ignore, [&](int i, double dy) {
            const double phi = feature(dy);
            if (i > 0) total += unclipped(i, phi);
            previous = phi;
        });
        cap = clip_factor * total / k_int;
    }
    total = 0.0;
    weight = first_weight;
    window.stream(ignore, [&](int i, double dy) {
        const double phi = feature(dy);
        if (i > 0) total += mass(i, phi);
        previous = phi;
    });

    // Lines 11-14: where the cumulative mass F passes the next quantile, there is a knot. Some thread of a warp finds
    // one at almost every sample and the others wait, so only what a knot takes is noted here.
    const double step = total / (k_int + 1);
    const long long rows = (long long)n * count;
    double F = 0.0, target = step;
    int j = 0;
    double* note = work;
    const auto found = [&](int i, double rest, double omega) {
        note[0] = i;
        note[rows] = rest;
        note[2 * rows] = omega;
        note += count;
        j++;
        target = (j + 1) * step;
    };
    weight = first_weight;
    window.stream(ignore, [&](int i, double dy) {
        const double phi = feature(dy);
        if (i > 0) {
            const double omega = mass(i, phi), next = F + omega;
            while (j < k_int && target <= next) found(i - 1, target - F, omega);
            F = next;
        }
        previous = phi;
    });
    while (j < k_int) found(m - 2, 1.0, 1.0);  // only where a sample is not finite: `fit` says so

    // Knots as fractional indices, with the first half of reference.spread; or as Algorithm 1's positions.
    double high = -ENDLESS;
    for (j = 0; j < k_int; j++) {
        const long long here = (long long)j * count;
        const double share = work[here + rows] / work[here + 2 * rows], whole = work[here];
        double u = whole + share;
        if (paper) {
            const int i = (int)whole;
            double low = window.position(i), next = window.position(i + 1);
            if (adaptive) {
                const double before = i == 0 ? low : window.position(i - 1);
                next = 0.5 * (low + next);
                low = 0.5 * (before + low);
            }
            u = low + share * (next - low);
        } else {
            high = largest_of(high, u - gap * j);
            work[here] = high;
        }
        interior[here] = u;
    }
    if (paper) return;

    const double end = 0.5 * (degree + 1), top = (m - 1) - end - gap * (k_int - 1), too_long = LONG * length / (m - 1);
    double low = ENDLESS;
    for (j = k_int - 1; j >= 0; j--) {
        const long long here = (long long)j * count;
        low = least_of(low, interior[here] - gap * j);
        double u = least_of(largest_of(0.5 * (work[here] + low), end), top) + gap * j;
        if (!REGULAR) {
            int i = min((int)u, m - 2);
            if (window.position(i + 1) - window.position(i) > too_long) {
                u = floor(u + 0.5);
                i = min((int)u, m - 2);
            }
            u = window.position(i) + (u - i) * (window.position(i + 1) - window.position(i));
        }
        interior[here] = u;
    }
}

#endif

#ifdef DEGREE

#define LARGEST 1e150
#define MAX_CONDITION 1e8

// Least squares at the knots t (n + DEGREE + 1, count), in one pass over samples and knots: a sample adds to the Gram
// entries of the DEGREE + 1 basis functions that live at it; a knot ends the leftmost of them, whose row of the banded
// LDL^T is worked out then and there, and everything moves up by one. Only the rows go to memory: work
// (n * (DEGREE + 2), count).
//
// The threads of a warp reach their knots at different samples. So that they need not all wait at each other's knots,
// they take up to `stretch` samples at a time, and then a knot if they are at one.
//
// The condition is bounded by the infinity norms of G and of G^-1, as in _kernels._solve_all; the row sums of G are the
// sums of the basis functions, because these add up to 1. Where the bound does not show that the condition is at most
// MAX_CONDITION it is infinity, and for gpu.py to look into; where a sample is not finite it is NaN.
extern "C" __global__ void __launch_bounds__(128)
    fit(const Pack* __restrict__ samples, const double* __restrict__ x, int xrow, int xstep, int count, int m, int n,
        int stretch, const double* __restrict__ t, double* __restrict__ work, REAL* __restrict__ knots,
        REAL* __restrict__ coefficients, REAL* __restrict__ condition) {
    constexpr int p = DEGREE;
    const int w = blockIdx.x * blockDim.x + threadIdx.x;
    if (w >= count) return;
    const Pack* next = samples + w;
    t += w;
    work += w;
    if (!REGULAR) x += (long long)w * xrow;
    const double stop = t[(long long)(n + p) * count];

    // Around the span from T[p - 1] to T[p]; inverse[q][a] = 1 / (T[p + a] - T[p + a - q]).
    double T[2 * p], inverse[p + 1][p];
#pragma unroll
    for (int k = 0; k < 2 * p; k++) T[k] = t[(long long)(k + 1) * count];
#pragma unroll
    for (int q = 1; q <= p; q++) {
#pragma unroll
        for (int a = 0; a < q; a++) inverse[q][a] = 1.0 / (T[p + a] - T[p + a - q]);
    }
    double G[p + 1][p + 1], z[p + 1], s[p + 1], sums[p + 1];
#pragma unroll
    for (int a = 0; a <= p; a++) {
        z[a] = sums[a] = 0.0;
        s[a] = a % 2 ? -1.0 : 1.0;
#pragma unroll
        for (int b = a; b <= p; b++) G[a][b] = 0.0;
    }

    Pack pack = *next, coming = pack;
    next += count;
    if (PACK < m) coming = *next;
    int i = 0;
    double at = REGULAR ? 0.0 : x[0];
    double size = 0.0, norm = 0.0, least = ENDLESS, sign = p % 2 ? -1.0 : 1.0;
    double knot = t[(long long)(2 * p + 1) * count];  // the next after T, fetched ahead of its use
    const double start = T[p - 1];
    bool last = !(T[p] < stop), positive = true;
    double* row = work;

    for (int f = 0; f < n;) {
        for (int turn = 0; turn < stretch && i < m && (last || at < T[p]); turn++) {
            const double y = pack.sample[0];
            size += fabs(y);
            double N[p + 1], right[p], left[p];
            const double where = REGULAR ? at : least_of(largest_of(at, start), stop);
#pragma unroll
            for (int a = 0; a < p; a++) {
                right[a] = T[p + a] - where;
                left[a] = where - T[p - 1 - a];
            }
            N[0] = 1.0;
#pragma unroll
            for (int q = 1; q <= p; q++) {
                double carried = 0.0;
#pragma unroll
                for (int a = 0; a < q; a++) {
                    const double term = N[a] * inverse[q][a];
                    N[a] = carried + right[a] * term;
                    carried = left[q - 1 - a] * term;
                }
                N[q] = carried;
            }
#pragma unroll
            for (int a = 0; a <= p; a++) {
                z[a] += N[a] * y;
                sums[a] += N[a];
#pragma unroll
                for (int b = a; b <= p; b++) G[a][b] += N[a] * N[b];
            }
            i++;
#pragma unroll
            for (int k = 1; k < PACK; k++) pack.sample[k - 1] = pack.sample[k];
            if (i % PACK == 0) {
                pack = coming;
                next += count;
                if (i + PACK < m) coming = *next;
            }
            if (REGULAR)
                at += 1.0;
            else if (i < m)
                at = x[(long long)i * xstep];
        }
        if (!(i == m || (!last && !(at < T[p])))) continue;

        // The leftmost function, f, is complete. Its successors move up, less what elimination takes from them.
        const double pivot = G[0][0], over = 1.0 / pivot, z0 = z[0], s0 = s[0];
        positive = positive && pivot > 0.0;
        least = least_of(least, pivot);
        norm = largest_of(norm, sums[0]);
        double first[p + 1];
#pragma unroll
        for (int b = 1; b <= p; b++) first[b] = G[0][b];
#pragma unroll
        for (int a = 1; a <= p; a++) {
            const double multiplier = first[a] * over;
            row[(long long)(a - 1) * count] = multiplier;
            z[a - 1] = z[a] - multiplier * z0;
            s[a - 1] = s[a] - multiplier * s0;
            sums[a - 1] = sums[a];
#pragma unroll
            for (int b = a; b <= p; b++) G[a - 1][b - 1] = G[a][b] - multiplier * first[b];
        }
        row[(long long)p * count] = z0 * over;
        row[(long long)(p + 1) * count] = s0 * over;
        row += (long long)(p + 2) * count;
        f++;

        // Function f + p joins. After the last one, those that join are empty, and touch nothing.
        sign = -sign;
        z[p] = sums[p] = 0.0;
        s[p] = sign;
#pragma unroll
        for (int a = 0; a <= p; a++) G[a][p] = 0.0;
#pragma unroll
        for (int k = 1; k < 2 * p; k++) T[k - 1] = T[k];
        T[2 * p - 1] = knot;
        knot = t[(long long)min(f + 2 * p + 1, n + p) * count];
        last = !(T[p] < stop);
#pragma unroll
        for (int q = 1; q <= p; q++) {
#pragma unroll
            for (int a = 1; a < q; a++) inverse[q][a - 1] = inverse[q][a];
            inverse[q][q - 1] = 1.0 / (T[p - 1 + q] - T[p - 1]);
        }
    }

    // Back substitution. z becomes the coefficients of the last p functions, s those of G^-1 (1, -1, 1, ...).
    const double infinity = 2.0 * ENDLESS, nan = infinity - infinity;
    const bool finite = size <= m * LARGEST;
    double inverse_norm = 0.0;
#pragma unroll
    for (int a = 0; a <= p; a++) z[a] = s[a] = 0.0;
    coefficients += (long long)w * n;
    for (int f = n - 1; f >= 0; f--) {
        row -= (long long)(p + 2) * count;
#pragma unroll
        for (int a = p; a > 0; a--) {
            z[a] = z[a - 1];
            s[a] = s[a - 1];
        }
        z[0] = row[(long long)p * count];
        s[0] = row[(long long)(p + 1) * count];
#pragma unroll
        for (int a = 1; a <= p; a++) {
            const double multiplier = row[(long long)(a - 1) * count];
            z[0] -= multiplier * z[a];
            s[0] -= multiplier * s[a];
        }
        inverse_norm = largest_of(inverse_norm, fabs(s[0]));
        coefficients[f] = finite ? z[0] : nan;
    }
    knots += (long long)w * (n + p + 1);
    for (int k = 0; k <= n + p; k++) knots[k] = finite ? t[(long long)k * count] : nan;
    const double bound = norm * inverse_norm;
    const bool sure = positive && least * MAX_CONDITION >= norm && bound <= MAX_CONDITION;
    condition[w] = !finite ? nan : sure ? bound : infinity;
}

#endif
