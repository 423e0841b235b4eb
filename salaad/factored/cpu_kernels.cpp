// Products with U·V + S on a CPU, S in compressed sparse rows, numbers in float32.
//
// Several rows of x are processed at a time, one in each lane of a vector, so that an entry of S, U or V is read once for
// all of them and no gather is needed. cpu_kernels.py compiles this file for the machine it runs on.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

struct Weight {  // the same fields as in cpu_kernels.py
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

constexpr int64_t MANY = 1 << 17;  // multiplications; fewer take less time than waking other threads

// Split 0..n among the threads, at multiples of `step`.
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

constexpr int LINE = 64;  // bytes of a cache line; a vector across two lines takes twice as long to read

// Memory of this thread for `count` floats, aligned to a cache line and valid until its next call.
float *scratch(int64_t count) {
  static thread_local std::vector<float> kept;
  kept.resize(count + LINE / sizeof(float));
  return reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(kept.data()) + LINE - 1) / LINE * LINE);
}

template <int N> Vector<N> load(const float *from) { return *reinterpret_cast<const Vector<N> *>(from); }
template <int N> void store(float *to, Vector<N> value) { *reinterpret_cast<Vector<N> *>(to) = value; }

// From two rows of a square tile: the columns whose index has 0 (or 1, if SET) in the binary digit DIGIT.
template <int DIGIT, bool SET, int N, int... I>
Vector<N> half(Vector<N> low, Vector<N> high, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  if constexpr (SET) return __builtin_shufflevector(low, high, (I & DIGIT ? N + I : I + DIGIT)...);
  return __builtin_shufflevector(low, high, (I & DIGIT ? N + I - DIGIT : I)...);
#else
  typedef int32_t Places __attribute__((vector_size(4 * N)));
  if constexpr (SET) return __builtin_shuffle(low, high, Places{(I & DIGIT ? N + I : I + DIGIT)...});
  return __builtin_shuffle(low, high, Places{(I & DIGIT ? N + I - DIGIT : I)...});
#endif
}

// Transpose N×N floats by exchanging the binary digits of row and column index one after the other.
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

// The first ROWS rows of `matrix`, each of `length` numbers, times a matrix of `length` rows of N·G lanes.
template <int N, int G, int ROWS>
inline __attribute__((always_inline)) void multiply(const float *matrix, int64_t length, const float *lanes, float *to) {
  Vector<N> sums[ROWS][G] = {};
  for (int64_t j = 0; j < length; j++)
    for (int i = 0; i < ROWS; i++)
      for (int g = 0; g < G; g++) sums[i][g] += matrix[i * length + j] * load<N>(lanes + N * (G * j + g));
  for (int i = 0; i < ROWS; i++)
    for (int g = 0; g < G; g++) store<N>(to + N * (G * i + g), sums[i][g]);
}

// The same for `count` rows, eight or four together, so that values read from the lanes are used several times.
template <int N, int G>
void multiply_all(const float *matrix, int64_t count, int64_t length, const float *lanes, float *to) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) multiply<N, G, 8>(matrix + i * length, length, lanes, to + N * G * i);
  for (; i + 4 <= count; i += 4) multiply<N, G, 4>(matrix + i * length, length, lanes, to + N * G * i);
  for (; i < count; i++) multiply<N, G, 1>(matrix + i * length, length, lanes, to + N * G * i);
}

// y (rows×n) = or += x (rows×m) times the transposed weight, for at most N·G rows, held as G vectors of N lanes.
template <int N, int G> void tile(const Weight &w, int64_t rows, const float *x, float *y, bool add, int threads) {
  constexpr int ALL = N * G;
  float *const columns = scratch(ALL * (w.m + w.rank));  // column j of x in its rows' lanes
  float *const hidden = columns + ALL * w.m;             // column k of x·Vᵀ
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

  share(w.rank, 8, threads, [=, &w](int64_t k, int64_t end) {
    multiply_all<N, G>(w.V + k * w.m, end - k, w.m, columns, hidden + ALL * k);
  });

  share(w.n, N, threads, [=, &w](int64_t first, int64_t end) {
    for (; first < end; first += N) {
      const int count = std::min<int64_t>(N, end - first);
      alignas(LINE) float low_rank[N * ALL];
      alignas(LINE) Vector<N> square[G][N] = {};
      multiply_all<N, G>(w.U + first * w.rank, count, w.rank, hidden, low_rank);
      for (int i = 0; i < count; i++) {
        Vector<N> sums[2][G] = {};  // two, since with one each addition waits for the last
        for (int g = 0; g < G; g++) sums[0][g] = load<N>(low_rank + ALL * i + N * g);
        const auto sum = [&](int c, int64_t e) {
          for (int g = 0; g < G; g++) sums[c][g] += w.values[e] * load<N>(columns + int64_t{ALL} * w.columns[e] + N * g);
        };
        int64_t e = w.starts[first + i];
        const int64_t last = w.starts[first + i + 1];
        for (; e + 2 <= last; e += 2) sum(0, e), sum(1, e + 1);
        if (e < last) sum(0, e);
        for (int g = 0; g < G; g++) square[g][i] = sums[0][g] + sums[1][g];
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

#if defined(__AVX512F__)
// One row of U·V + S times one x, in whole vectors with a masked last one, so that no branch is mispredicted.
float dot(const Weight &w, int64_t i, const float *x, const float *hidden) {
  const auto left = [](int64_t count) -> __mmask16 { return count < 16 ? (1 << count) - 1 : 0xffff; };
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < w.rank; k += 16) {
    const __mmask16 here = left(w.rank - k);
    const __m512 u = _mm512_maskz_loadu_ps(here, w.U + i * w.rank + k);
    sum = _mm512_fmadd_ps(u, _mm512_maskz_loadu_ps(here, hidden + k), sum);
  }
  for (int64_t e = w.starts[i]; e < w.starts[i + 1]; e += 16) {
    const __mmask16 here = left(w.starts[i + 1] - e);
    const __m512i columns = _mm512_maskz_loadu_epi32(here, w.columns + e);
    const __m512 from = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), here, columns, x, sizeof(float));
    sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(here, w.values + e), from, sum);
  }
  return _mm512_reduce_add_ps(sum);
}
#else
// One row of U·V + S times one x.
float dot(const Weight &w, int64_t i, const float *x, const float *hidden) {
  float low_rank = 0, sums[4] = {};  // four, since with one each addition waits for the last
  for (int64_t k = 0; k < w.rank; k++) low_rank += w.U[i * w.rank + k] * hidden[k];
  int64_t e = w.starts[i];
  const int64_t last = w.starts[i + 1];
  for (; e + 4 <= last; e += 4)
    for (int c = 0; c < 4; c++) sums[c] += w.values[e + c] * x[w.columns[e + c]];
  for (; e < last; e++) sums[0] += w.values[e] * x[w.columns[e]];
  return low_rank + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
#endif

// The same as `tile` for a single row of x, which cannot fill lanes.
void single(const Weight &w, const float *x, float *y, bool add, int threads) {
  float *const hidden = scratch(w.rank);
  share(w.rank, 1, threads, [=, &w](int64_t k, int64_t end) {
    for (; k < end; k++) {
      float sum = 0;
      for (int64_t j = 0; j < w.m; j++) sum += w.V[k * w.m + j] * x[j];
      hidden[k] = sum;
    }
  });
  share(w.n, 1, threads, [=, &w](int64_t i, int64_t end) {
    for (; i < end; i++) y[i] = (add ? y[i] : 0) + dot(w, i, x, hidden);
  });
}

// y (rows×n) = or += x·Vᵀ·Uᵀ + x·Sᵀ for x (rows×m).
void linear(const Weight &w, int64_t rows, const float *x, float *y, bool add, int threads) {
  if (rows == 1) return single(w, x, y, add, threads);
  if (rows <= 4) return tile<4, 1>(w, rows, x, y, add, threads);
  if constexpr (WIDTH > 8)
    if (rows <= 8) return tile<8, 1>(w, rows, x, y, add, threads);
  if (rows <= WIDTH) return tile<WIDTH, 1>(w, rows, x, y, add, threads);
  constexpr int MOST = 2 * WIDTH;
  const int64_t tiles = (rows + MOST - 1) / MOST;
  const int outer = tiles < threads ? 1 : threads;
  share(tiles, 1, outer, [=, &w](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const int64_t count = std::min<int64_t>(MOST, rows - i * MOST);
      tile<WIDTH, 2>(w, count, x + i * MOST * w.m, y + i * MOST * w.n, add, threads / outer);
    }
  });
}

// y (count×m) = or += the rows `ids` (count) of U·V + S; false if an id is out of range.
bool rows(const Weight &w, int64_t count, const int64_t *ids, float *y, bool add, int threads) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= w.n) return false;
  share(count, 1, threads, [=, &w](int64_t i, int64_t end) {
    for (; i < end; i++) {
      float *row = y + i * w.m;
      const float *u = w.U + ids[i] * w.rank;
      if (!add) std::fill(row, row + w.m, 0.0f);
      for (int64_t k = 0; k < w.rank; k++)
        for (int64_t j = 0; j < w.m; j++) row[j] += u[k] * w.V[k * w.m + j];
      for (int64_t e = w.starts[ids[i]]; e < w.starts[ids[i] + 1]; e++) row[w.columns[e]] += w.values[e];
    }
  });
  return true;
}

}  // namespace

// The entry points from Python, since a call through ctypes can take longer than a small layer's product. They use only
// Python's stable ABI, declared here because Python's headers may be missing where there is a compiler.
extern "C" {
struct PyObject;
typedef PyObject *Function(PyObject *, PyObject *const *arguments, intptr_t count);
struct PyMethodDef {
  const char *name;
  Function *function;
  int flags;
  const char *doc;
};
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *self, PyObject *module);
PyObject *PyTuple_Pack(intptr_t count, ...);
PyObject *PyBool_FromLong(long);
long long PyLong_AsLongLong(PyObject *);
PyObject *PyErr_Occurred();
void *PyEval_SaveThread();
void PyEval_RestoreThread(void *);
}

namespace {

constexpr int METH_FASTCALL = 0x80;

// Arguments, all integers: address of the Weight, number of rows, addresses of x or the ids and of y, add, threads.
// Work large enough for several threads is done without holding Python's global lock.
template <typename In, typename Product>
PyObject *call(PyObject *const *arguments, int64_t (*work)(const Weight &), const Product &product) {
  long long given[6];
  std::transform(arguments, arguments + 6, given, PyLong_AsLongLong);
  if (PyErr_Occurred()) return nullptr;
  const Weight &w = *reinterpret_cast<const Weight *>(given[0]);
  const int64_t count = given[1];
  const auto in = reinterpret_cast<const In *>(given[2]);
  const auto y = reinterpret_cast<float *>(given[3]);
  const bool add = given[4];
  if (count * work(w) < MANY) return PyBool_FromLong(product(w, count, in, y, add, 1));
  void *const here = PyEval_SaveThread();
  const bool done = product(w, count, in, y, add, given[5]);
  PyEval_RestoreThread(here);
  return PyBool_FromLong(done);
}

PyObject *call_linear(PyObject *, PyObject *const *arguments, intptr_t) {
  const auto work = [](const Weight &w) { return (w.rank + 1) * (w.n + w.m) + w.starts[w.n]; };
  return call<float>(arguments, work, [](const auto &...all) { return linear(all...), true; });
}

PyObject *call_rows(PyObject *, PyObject *const *arguments, intptr_t) {
  const auto work = [](const Weight &w) { return (w.rank + 1) * w.m + (w.n ? w.starts[w.n] / w.n : 0); };
  return call<int64_t>(arguments, work, rows);
}

}  // namespace

// The tuple (linear, rows) of Python functions.
extern "C" PyObject *products() {
  static PyMethodDef linear = {"linear", call_linear, METH_FASTCALL, nullptr};
  static PyMethodDef rows = {"rows", call_rows, METH_FASTCALL, nullptr};
  return PyTuple_Pack(2, PyCFunction_NewEx(&linear, nullptr, nullptr), PyCFunction_NewEx(&rows, nullptr, nullptr));
}
