// Randomly generated functions, to compare captured functions with plain ones.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "tests/graph/call_trace.h"

namespace penstock::graph {

// The kinds of steps a random program consists of.
enum class Looks {
  Floats,    // floats at different places of a memory
  AnyDtype,  // memory accessed as other dtypes, conjugates and negatives, and elements that share an address
  AnyWrite   // also: tensors that get other memory or fewer elements, and users' functions that write in
             // backward
};

namespace random_steps {

inline at::Tensor as_complex(const at::Tensor& x) {
  const bool fits = x.scalar_type() == at::kFloat && !x.is_neg() && x.dim() > 0 && x.size(-1) == 2 &&
                    x.stride(-1) == 1 && x.storage_offset() % 2 == 0;
  for (std::int64_t dim = 0; fits && dim + 1 < x.dim(); ++dim)
    if (x.stride(dim) % 2 != 0) return x.neg();
  return fits ? at::view_as_complex(x) : x.neg();
}

inline at::Tensor as_other_dtype(const at::Tensor& x) {
  if (x.is_conj() || x.is_neg() || x.is_complex()) return x.resolve_conj().resolve_neg();
  if (x.scalar_type() == at::kFloat) return x.view(at::kInt);
  return x.scalar_type() == at::kInt ? x.view(at::kFloat) : x;
}

inline bool may_be_written(const at::Tensor& x) { return !overlaps_itself(geometry_of(x)); }

// Steps that occur only in programs over any dtype.
inline at::Tensor look(std::size_t which, const at::Tensor& x, std::int64_t dim) {
  switch (which) {
    case 0:
      return x.conj();
    case 1:
      return x.is_complex() ? at::view_as_real(x.resolve_conj()) : as_complex(x);
    case 2:
      return x.is_complex() && !x.is_conj() ? at::view_as_real(x) : as_complex(x);
    case 3:
      return at::real(x);
    case 4:
      return x.is_complex() ? at::imag(x) : x._neg_view();
    case 5:
      return as_other_dtype(x);
    case 6:
      return x.resolve_conj();
    case 7:
      return x.resolve_neg();
    case 8:
      return x._neg_view();
    case 9:
      return x.dim() > 1 ? x.mH() : x.conj();
    case 10:
      return x.dim() > 0 && x.size(dim) > 1 ? x.unfold(dim, 2, 1) : x.unsqueeze(0);
    case 11: {
      std::vector<std::int64_t> sizes(x.sizes().begin(), x.sizes().end());
      sizes.insert(sizes.begin(), 2);
      return x.unsqueeze(0).expand(sizes);
    }
    case 12:
      return x.conj_physical();
    default:
      return x.scalar_type() == at::kInt ? x.mul(3) : x.mul(c10::Scalar(c10::complex<double>(0.5, -1)));
  }
}
constexpr std::size_t kLooks = 14;

// A batch of matrices that shows the elements of a tensor with floats.
inline at::Tensor as_batch(const at::Tensor& x) {
  at::Tensor batch = x;
  while (batch.dim() < 3) batch = batch.unsqueeze(0);
  return batch.dim() == 3 ? batch : batch.flatten(0, batch.dim() - 3);
}

// Products of batches of matrices, some of them with views among the factors, and a view of the result. With
// `large`, of sizes for which an executor has ways of its own. Halved twice or more, so that repeated
// products do not grow without a bound; exact as long as they are small.
inline at::Tensor batched_product(std::size_t which, const at::Tensor& x, bool large) {
  at::Tensor a = as_batch(x).mul(0.25);
  if (large) a = a.repeat({1, 8, 4});
  const at::Tensor b = a.transpose(1, 2), twice = at::cat({a, a.neg()}, 0);
  switch (which) {
    case 0:
      return at::bmm(a, b).select(0, 0);
    case 1:
      return at::bmm(b, a).transpose(1, 2).slice(1, 0, 3);
    case 2:
      return at::matmul(twice, b.select(0, 0)).slice(2, 0, 2);
    case 3:
      return at::matmul(twice, b.select(0, 0).select(1, 0)).unsqueeze(0);
    case 4:
      return at::baddbmm(at::bmm(a, b), a, b, 0.5, 2).slice(1, 0, 2);
    case 5:
      return at::einsum("bij,bkj->bik", {a, a}).select(0, 0);
    case 6:
      return at::einsum("bij,bjk,bkl->il", {a, b, a}).slice(0, 0, 3);
    case 7:
      return at::matmul(a.unsqueeze(0), twice.transpose(1, 2).unsqueeze(1)).select(0, 0).slice(2, 0, 2);
    default:
      return at::bmm(twice.select(0, 0).expand({3, a.size(1), a.size(2)}),
                     b.select(0, 0).expand({3, a.size(2), a.size(1)}))
          .select(0, 2)
          .slice(0, 0, 3);
  }
}
constexpr std::size_t kProducts = 9;

// Operators that return the memory of their argument, some of them without saying so.
inline at::Tensor same_memory(std::size_t which, const at::Tensor& x) {
  // Autograd does not know what it returns as a view, and would not see what is written to it.
  const bool tracked = x.requires_grad();
  switch (which) {
    case 0:
      return tracked || !x.is_contiguous() ? at::alias(x) : at::_unsafe_view(x, {-1});
    case 1:
      return tracked || !x.is_contiguous() ? x.contiguous() : at::_unsafe_view(x, x.sizes());
    case 2:
      return x.expand(x.sizes());
    case 3:
      return at::_reshape_alias(x, x.sizes(), x.strides());
    case 4:
      // Of a tensor that nobody else has: it returns the tensor itself, whose shape others could change.
      return at::lift_fresh(x.clone());
    case 5:
      return x.reshape(x.sizes());
    case 6:
      return x.to(x.scalar_type());
    default:
      return at::_unsafe_view(x.clone(at::MemoryFormat::Contiguous), {-1});
  }
}
constexpr std::size_t kSameMemory = 8;

// Doubles its input; backward counts in a buffer, and the gradient depends on it.
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& buffer) {
    context->saved_data["buffer"] = buffer;
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor buffer = context->saved_data["buffer"].toTensor();
    buffer.add_(1);
    return {gradients[0] * buffer.sum(), at::Tensor()};
  }
};

// Steps that occur only in programs with any write.
inline void write(std::size_t which, const at::Tensor& x, const at::Tensor& other, Tensors& pool) {
  switch (which) {
    case 0:
      if (!x.requires_grad() && x.numel() > 1) x.resize_({x.numel() / 2});
      break;
    case 1:
      if (!x.requires_grad() && x.dim() == 2 && x.is_contiguous()) x.resize_({x.size(1), x.size(0)});
      break;
    case 2:
      if (!x.requires_grad() && !other.requires_grad() && x.scalar_type() == other.scalar_type())
        x.set_(other);
      break;
    case 3:
      if (!x.requires_grad() && !other.requires_grad() && x.scalar_type() == other.scalar_type())
        x.set_(other.neg().resolve_neg());
      break;
    default:
      // Writing one place twice is undefined, in backward as well.
      if (x.scalar_type() == at::kFloat && !other.requires_grad() && other.scalar_type() == at::kFloat &&
          may_be_written(other))
        pool.push_back(Counted::apply(x, other));
      break;
  }
}
constexpr std::size_t kWrites = 5;

}  // namespace random_steps

// A function of views, writes and exact arithmetic, determined by `seed` and the shapes it encounters.
inline Tensors random_program(unsigned seed, const Tensors& inputs, Looks looks = Looks::Floats) {
  using namespace random_steps;
  std::mt19937 random(seed);
  const auto choose = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Tensors pool = inputs;
  const auto any = [&]() -> at::Tensor { return pool[choose(pool.size())]; };
  const auto partner_of = [&](const at::Tensor& tensor) {
    for (int tries = 0; tries < 8; ++tries)
      if (const at::Tensor other = any();
          other.sizes() == tensor.sizes() && other.scalar_type() == tensor.scalar_type())
        return other;
    return tensor;
  };
  const auto half = [](const at::Tensor& x) {
    return x.scalar_type() == at::kInt ? c10::Scalar(3) : c10::Scalar(0.5);
  };
  const std::size_t steps = 3 + choose(8);
  // Numbers of their own, so that the other steps of a program do not depend on how many these are.
  std::mt19937 further(seed + 77);
  for (std::size_t step = 0; step < steps; ++step) {
    if (const at::Tensor of = pool[further() % pool.size()]; further() % 6 == 0) {
      const std::size_t which = further() % (kProducts + kSameMemory);
      const bool large = further() % 2 == 0, numbers = of.is_floating_point() || of.is_complex();
      if (which >= kProducts)
        pool.push_back(random_steps::same_memory(which - kProducts, of));
      else if (numbers && !of.is_conj() && !of.is_neg() && of.dim() <= 4 && of.numel() <= 64)
        pool.push_back(batched_product(which, of, large));
    }
    const at::Tensor x = any();
    const auto dim = static_cast<std::int64_t>(x.dim() > 0 ? choose(static_cast<std::size_t>(x.dim())) : 0);
    const std::size_t kinds = looks == Looks::Floats     ? 18
                              : looks == Looks::AnyDtype ? 18 + kLooks
                                                         : 18 + kLooks + kWrites;
    std::size_t which = choose(kinds);
    if (which >= 18 + kLooks) {
      write(which - 18 - kLooks, x, any(), pool);
      continue;
    }
    if (which >= 18) {
      pool.push_back(look(which - 18, x, dim));
      continue;
    }
    // Writing one place twice is undefined.
    if (which >= 11 && which != 14 && which != 17 && !may_be_written(x)) which = 0;
    // Autograd ignores transpose_ when it recreates a view of another dtype or a conjugate after a write: the
    // gradients would be those of another program.
    if (which == 17 && looks != Looks::Floats && !(x.is_same(inputs[0]) || x.is_same(inputs[2]))) which = 3;
    switch (which) {
      case 0:
        pool.push_back(x.dim() > 0 ? x.select(dim, x.size(dim) - 1) : x.unsqueeze(0));
        break;
      case 1:
        pool.push_back(x.dim() > 0 ? x.slice(dim, x.size(dim) > 1 ? 1 : 0) : x.view({1}));
        break;
      case 2:
        pool.push_back(x.dim() > 0 ? x.slice(dim, 0, x.size(dim), 2) : x.view({1, 1}));
        break;
      case 3:
        pool.push_back(x.dim() > 1 ? x.transpose(0, x.dim() - 1) : x.unsqueeze(0));
        break;
      case 4:
        pool.push_back(x.is_contiguous() ? x.view(-1) : x.reshape(-1));
        break;
      case 5:
        pool.push_back(x.unsqueeze(dim));
        break;
      case 6:
        pool.push_back(x.detach());
        break;
      case 7:
        pool.push_back(x.mul(half(x)));
        break;
      case 8:
        pool.push_back(x + partner_of(x));
        break;
      case 9:
        pool.push_back(x * partner_of(x));
        break;
      case 10:
        pool.push_back(x.is_complex() ? x.sub(2) : x.relu());
        break;
      case 11:
        x.mul_(half(x));
        break;
      case 12: {
        // Reading memory while writing it is undefined in eager mode.
        const at::Tensor partner = partner_of(x);
        x.add_(partner.is_alias_of(x) ? partner.clone() : partner);
        break;
      }
      case 13:
        x.copy_(partner_of(x).neg());
        break;
      case 14:
        x.select(0, 0).zero_();
        break;
      case 15:
        x.is_complex() ? x.sub_(2) : x.relu_();
        break;
      case 16: {
        const at::NoGradGuard no_grad;
        x.add_(1);
        break;
      }
      case 17:
        x.transpose_(0, std::max<std::int64_t>(x.dim() - 1, 0));
        break;
    }
  }
  Tensors results;
  const std::size_t count = 1 + choose(3);
  for (std::size_t i = 0; i < count; ++i)
    results.push_back(pool[pool.size() - 1 - choose(std::min<std::size_t>(pool.size(), 4))]);
  return results;
}

}  // namespace penstock::graph
