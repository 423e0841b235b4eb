// Products with U·V + S on a CPU, S in compressed sparse rows, numbers in float32.
//
// Rows of x go through several at a time, one in each lane of a vector, so that an entry of S, U or V is read once for
// all of them and nothing is gathered. salaad/native.py compiles this for the machine it runs on.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace {

struct Weight {  // as in salaad/native.py
  int64_t n, m, rank;
  const float *U, *V;  // n×rank, rank×m
  const int32_t *starts, *columns;
  const float *values;
};

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // floats of a vector register; wider vectors spill into memory
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

constexpr int64_t MANY = 1 << 17;  // multiplications; what fewer take is less than to wake other threads

// Give each thread its part of 0..n, with borders at multiples of `step`.
template <typename Part> void share(int64_t n, int64_t step, int threads, const Part &part) {
  if (threads == 1) return part(0, n);
  const int64_t each = (n + threads * step - 1) / (threads * step) * step;
#pragma omp parallel for num_threads(threads)
  for (int i = 0; i < threads; i++) part(std::min(n, i * each), std::min(n, (i + 1) * each));
}

template <int N> struct Lanes {
  typedef float Vector __attribute__((vector_size(4 * N), aligned(4)));
};
template <int N> using Vector = typename Lanes<N>::Vector;

template <int N> Vector<N> load(const float *from) { return *reinterpret_cast<const Vector<N> *>(from); }
template <int N> void store(float *to, Vector<N> value) { *reinterpret_cast<Vector<N> *>(to) = value; }

// Of two rows of a square whose columns differ in one binary digit: the columns where it is 0, or those where it is 1.
template <int DIGIT, bool SET, int N, int... I>
Vector<N> half(Vector<N> low, Vector<N> high, std::integer_sequence<int, I...>) {
  if constexpr (SET) return __builtin_shufflevector(low, high, (I & DIGIT ? N + I : I + DIGIT)...);
  return __builtin_shufflevector(low, high, (I & DIGIT ? N + I - DIGIT : I)...);
}

// Transpose N×N numbers, exchanging one binary digit of row and column after the other.
template <int N, int DIGIT = 1> inline __attribute__((always_inline)) void transpose(Vector<N> *square) {
  if constexpr (DIGIT < N) {
    constexpr auto all = std::make_integer_sequence<int, N>();
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      if (i & DIGIT) continue;
      const Vector<N> low = square[i], high = square[i + DIGIT];
      square[i] = half<DIGIT, false, N>(low, high, all);
      square[i + DIGIT] = half<DIGIT, true, N>(low, high, all);
    }
    transpose<N, 2 * DIGIT>(square);
  }
}

// y (rows×n) = or += the product of x (rows×m), for at most N·G rows, which go through as G vectors of N.
template <int N, int G> void tile(const Weight &w, int64_t rows, const float *x, float *y, bool add, int threads) {
  constexpr int ALL = N * G;
  static thread_local std::vector<float> kept;  // column j of x in its rows' lanes; then column k of x·Vᵀ
  kept.resize(ALL * (w.m + w.rank));
  float *const columns = kept.data(), *const hidden = columns + ALL * w.m;
  const auto row = [=, &w](int lane) { return x + std::min<int64_t>(lane, rows - 1) * w.m; };
  const int64_t whole = w.m / N * N;
  for (int64_t j = 0; j < whole; j += N)
    for (int g = 0; g < G; g++) {
      Vector<N> square[N];
      for (int i = 0; i < N; i++) square[i] = load<N>(row(N * g + i) + j);
      transpose<N>(square);
      for (int i = 0; i < N; i++) store<N>(columns + ALL * (j + i) + N * g, square[i]);
    }
  for (int64_t j = whole; j < w.m; j++)
    for (int lane = 0; lane < ALL; lane++) columns[ALL * j + lane] = row(lane)[j];

  share(w.rank, 4, threads, [=, &w](int64_t k, int64_t end) {
    for (; k < end; k += 4) {
      const int64_t count = std::min<int64_t>(4, end - k);
      const float *v[4];  // beyond the last, the last again
      for (int i = 0; i < 4; i++) v[i] = w.V + (k + std::min<int64_t>(i, count - 1)) * w.m;
      Vector<N> sums[4][G] = {};
      for (int64_t j = 0; j < w.m; j++)
        for (int i = 0; i < 4; i++)
          for (int g = 0; g < G; g++) sums[i][g] += v[i][j] * load<N>(columns + ALL * j + N * g);
      for (int i = 0; i < count; i++)
        for (int g = 0; g < G; g++) store<N>(hidden + ALL * (k + i) + N * g, sums[i][g]);
    }
  });

  share(w.n, N, threads, [=, &w](int64_t first, int64_t end) {
    for (; first < end; first += N) {
      const int count = std::min<int64_t>(N, end - first);
      Vector<N> square[G][N] = {};
      for (int i = 0; i < count; i++) {
        const float *u = w.U + (first + i) * w.rank;
        Vector<N> sums[4][G] = {};  // one alone would wait for each of its additions
        const auto sum = [&](int c, float weight, const float *from) {
          for (int g = 0; g < G; g++) sums[c][g] += weight * load<N>(from + N * g);
        };
        int64_t k = 0, e = w.starts[first + i];
        const int64_t last = w.starts[first + i + 1];
        for (; k + 4 <= w.rank; k += 4)
          for (int c = 0; c < 4; c++) sum(c, u[k + c], hidden + ALL * (k + c));
        for (; k < w.rank; k++) sum(0, u[k], hidden + ALL * k);
        for (; e + 4 <= last; e += 4)
          for (int c = 0; c < 4; c++) sum(c, w.values[e + c], columns + ALL * w.columns[e + c]);
        for (; e < last; e++) sum(0, w.values[e], columns + ALL * w.columns[e]);
        for (int g = 0; g < G; g++) square[g][i] = (sums[0][g] + sums[1][g]) + (sums[2][g] + sums[3][g]);
      }
      for (int g = 0; g < G; g++) {
        transpose<N>(square[g]);
        for (int64_t lane = N * g; lane < std::min<int64_t>(rows, N * (g + 1)); lane++) {
          float *to = y + lane * w.n + first;
          const Vector<N> from = square[g][lane - N * g];
          if (count == N) {
            store<N>(to, add ? load<N>(to) + from : from);
          } else {
            for (int i = 0; i < count; i++) to[i] = (add ? to[i] : 0) + from[i];
          }
        }
      }
    }
  });
}

// The same for one row of x, which has no lanes to fill.
void single(const Weight &w, const float *x, float *y, bool add, int threads) {
  static thread_local std::vector<float> kept;
  kept.resize(w.rank);
  float *const hidden = kept.data();
  share(w.rank, 1, threads, [=, &w](int64_t k, int64_t end) {
    for (; k < end; k++) {
      float sum = 0;
      for (int64_t j = 0; j < w.m; j++) sum += w.V[k * w.m + j] * x[j];
      hidden[k] = sum;
    }
  });
  share(w.n, 1, threads, [=, &w](int64_t i, int64_t end) {
    for (; i < end; i++) {
      float sum = add ? y[i] : 0, sums[4] = {};
      for (int64_t k = 0; k < w.rank; k++) sum += w.U[i * w.rank + k] * hidden[k];
      int64_t e = w.starts[i];
      const int64_t last = w.starts[i + 1];
      for (; e + 4 <= last; e += 4)
        for (int c = 0; c < 4; c++) sums[c] += w.values[e + c] * x[w.columns[e + c]];
      for (; e < last; e++) sum += w.values[e] * x[w.columns[e]];
      y[i] = sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  });
}

}  // namespace

// y (rows×n) = x·Vᵀ·Uᵀ + x·Sᵀ for x (rows×m), or y += x·Sᵀ where only S is asked for.
extern "C" void slr_linear(const Weight *weight, int64_t rows, const float *x, float *y, bool only_S, int threads) {
  Weight w = *weight;
  if (only_S) w.rank = 0;
  if (rows * (w.rank * (w.n + w.m) + w.starts[w.n]) < MANY) threads = 1;
  if (rows == 1) return single(w, x, y, only_S, threads);
  if (rows <= 4) return tile<4, 1>(w, rows, x, y, only_S, threads);
  if constexpr (WIDTH > 8)
    if (rows <= 8) return tile<8, 1>(w, rows, x, y, only_S, threads);
  if (rows <= WIDTH) return tile<WIDTH, 1>(w, rows, x, y, only_S, threads);
  constexpr int MOST = 2 * WIDTH;
  const int64_t tiles = (rows + MOST - 1) / MOST;
  const int outer = tiles < threads ? 1 : threads;
  share(tiles, 1, outer, [=, &w](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const int64_t count = std::min<int64_t>(MOST, rows - i * MOST);
      tile<WIDTH, 2>(w, count, x + i * MOST * w.m, y + i * MOST * w.n, only_S, threads / outer);
    }
  });
}

// Rows `ids` (count) of U·V + S in y (count×m), or S's added to them; false if one of them is not there.
extern "C" bool slr_rows(const Weight *weight, int64_t count, const int64_t *ids, float *y, bool only_S, int threads) {
  const Weight &w = *weight;
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= w.n) return false;
  if (count * (w.rank * w.m + w.starts[w.n] / w.n) < MANY) threads = 1;
  share(count, 1, threads, [=, &w](int64_t i, int64_t end) {
    for (; i < end; i++) {
      float *row = y + i * w.m;
      const float *u = w.U + ids[i] * w.rank;
      if (!only_S) {
        std::fill(row, row + w.m, 0.0f);
        for (int64_t k = 0; k < w.rank; k++)
          for (int64_t j = 0; j < w.m; j++) row[j] += u[k] * w.V[k * w.m + j];
      }
      for (int64_t e = w.starts[ids[i]]; e < w.starts[ids[i] + 1]; e++) row[w.columns[e]] += w.values[e];
    }
  });
  return true;
}
