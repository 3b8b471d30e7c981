#include "tests/torch/module_zoo.h"

namespace penstock::zoo {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

template <class Holder>
Case unary(Holder module, at::Tensor input, bool random = false) {
  return {"",
          module.ptr(),
          [module](const Tensors& in) mutable { return Tensors{module->forward(in[0])}; },
          {input},
          random};
}

Case function(std::function<Tensors(const Tensors&)> forward, Tensors inputs) {
  return {"", nullptr, std::move(forward), std::move(inputs)};
}

// A block of a current language model, written the way a user would.
struct RmsNormImpl : nn::Module {
  explicit RmsNormImpl(std::int64_t width) { weight = register_parameter("weight", torch::ones({width})); }
  at::Tensor forward(const at::Tensor& x) {
    return x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-6) * weight;
  }
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

at::Tensor rotate(const at::Tensor& x) {  // rotary position embedding over (batch, heads, length, width)
  const std::int64_t length = x.size(2), half = x.size(3) / 2;
  const auto frequency = torch::pow(10000.0, -torch::arange(half, x.options()) / static_cast<double>(half));
  const auto angle = torch::outer(torch::arange(length, x.options()), frequency);
  const auto parts = x.chunk(2, -1);
  return torch::cat(
      {parts[0] * angle.cos() - parts[1] * angle.sin(), parts[1] * angle.cos() + parts[0] * angle.sin()}, -1);
}

struct LlamaBlockImpl : nn::Module {
  LlamaBlockImpl() {
    norm1 = register_module("norm1", RmsNorm(16));
    norm2 = register_module("norm2", RmsNorm(16));
    q = register_module("q", nn::Linear(nn::LinearOptions(16, 16).bias(false)));
    kv = register_module("kv", nn::Linear(nn::LinearOptions(16, 16).bias(false)));
    out = register_module("out", nn::Linear(nn::LinearOptions(16, 16).bias(false)));
    gate_up = register_module("gate_up", nn::Linear(nn::LinearOptions(16, 64).bias(false)));
    down = register_module("down", nn::Linear(nn::LinearOptions(32, 16).bias(false)));
  }
  at::Tensor forward(at::Tensor x) {
    const std::int64_t batch = x.size(0), length = x.size(1);
    auto h = norm1(x);
    auto query = rotate(q(h).view({batch, length, 4, 4}).transpose(1, 2));
    auto pair = kv(h).view({batch, length, 2, 2, 4}).unbind(2);
    auto key = rotate(pair[0].transpose(1, 2)).repeat_interleave(2, 1);
    auto value = pair[1].transpose(1, 2).repeat_interleave(2, 1);
    auto scores = torch::matmul(query, key.transpose(-2, -1)) / 2.0;
    auto mask = torch::ones({length, length}, x.options().dtype(torch::kBool)).triu(1);
    auto attended = torch::matmul(scores.masked_fill(mask, -1e9).softmax(-1), value);
    x = x + out(attended.transpose(1, 2).reshape({batch, length, 16}));
    auto parts = gate_up(norm2(x)).chunk(2, -1);
    return x + down(F::silu(parts[0]) * parts[1]);
  }
  RmsNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear q{nullptr}, kv{nullptr}, out{nullptr}, gate_up{nullptr}, down{nullptr};
};
TORCH_MODULE(LlamaBlock);

struct Square : torch::autograd::Function<Square> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    return {grads[0] * 2 * context->get_saved_variables()[0]};
  }
};

at::Tensor tokens(at::IntArrayRef sizes, std::int64_t high) {
  return torch::randint(0, high, sizes, torch::kLong);
}

std::vector<Entry> build() {
  std::vector<Entry> entries;
  const auto add = [&](const std::string& name, std::function<Case()> make) {
    entries.push_back({name, [name, make] {
                         torch::manual_seed(11);
                         Case made = make();
                         made.name = name;
                         return made;
                       }});
  };
  using torch::randn;
  add("Linear", [] { return unary(nn::Linear(8, 5), randn({3, 8})); });
  add("LinearNoBias3d", [] {
    return unary(nn::Linear(nn::LinearOptions(8, 5).bias(false)), randn({2, 3, 8}));
  });
  add("Bilinear", [] {
    nn::Bilinear m(4, 5, 3);
    return Case{"",
                m.ptr(),
                [m](const Tensors& in) mutable { return Tensors{m->forward(in[0], in[1])}; },
                {randn({2, 4}), randn({2, 5})}};
  });
  add("Mlp", [] {
    return unary(
        nn::Sequential(nn::Linear(8, 16), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(16, 4), nn::GELU()),
        randn({3, 8}));
  });
  add("Conv1d", [] { return unary(nn::Conv1d(nn::Conv1dOptions(3, 4, 3).padding(1)), randn({2, 3, 8})); });
  add("Conv2d", [] {
    return unary(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1).stride(2)), randn({2, 3, 8, 8}));
  });
  add("Conv2dGroups", [] {
    return unary(nn::Conv2d(nn::Conv2dOptions(4, 8, 3).groups(2).dilation(2).bias(false)),
                 randn({2, 4, 9, 9}));
  });
  add("Conv3d", [] { return unary(nn::Conv3d(nn::Conv3dOptions(2, 3, 3)), randn({1, 2, 5, 5, 5})); });
  add("ConvTranspose2d", [] {
    return unary(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 4, 3).stride(2)), randn({2, 3, 4, 4}));
  });
  add("BatchNorm1d", [] { return unary(nn::BatchNorm1d(4), randn({6, 4})); });
  add("ConvBatchNorm", [] {
    return unary(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::BatchNorm2d(8), nn::ReLU()),
                 randn({2, 3, 8, 8}));
  });
  add("LayerNorm", [] { return unary(nn::LayerNorm(nn::LayerNormOptions({8})), randn({3, 4, 8})); });
  add("GroupNorm", [] { return unary(nn::GroupNorm(2, 4), randn({2, 4, 3})); });
  add("InstanceNorm2d", [] {
    return unary(nn::InstanceNorm2d(nn::InstanceNorm2dOptions(4).affine(true)), randn({2, 4, 5, 5}));
  });
  add("RmsNorm", [] { return unary(RmsNorm(8), randn({2, 3, 8})); });
  add("Embedding", [] { return unary(nn::Embedding(20, 8), tokens({4, 3}, 20)); });
  add("EmbeddingPadding", [] {
    return unary(nn::Embedding(nn::EmbeddingOptions(20, 8).padding_idx(0)), tokens({4, 3}, 20));
  });
  add("LSTM", [] {
    nn::LSTM m(nn::LSTMOptions(4, 5).num_layers(2).batch_first(true));
    return Case{"",
                m.ptr(),
                [m](const Tensors& in) mutable {
                  auto [out, state] = m->forward(in[0]);
                  return Tensors{out, std::get<0>(state), std::get<1>(state)};
                },
                {randn({2, 3, 4})}};
  });
  add("GRU", [] {
    nn::GRU m(nn::GRUOptions(4, 5).bidirectional(true));
    return Case{"",
                m.ptr(),
                [m](const Tensors& in) mutable { return Tensors{std::get<0>(m->forward(in[0]))}; },
                {randn({3, 2, 4})}};
  });
  add("MultiheadAttention", [] {
    nn::MultiheadAttention m(nn::MultiheadAttentionOptions(8, 2));
    return Case{"",
                m.ptr(),
                [m](const Tensors& in) mutable {
                  auto [out, weights] = m->forward(in[0], in[0], in[0]);
                  return Tensors{out, weights};
                },
                {randn({3, 2, 8})}};
  });
  add("TransformerEncoderLayer", [] {
    nn::TransformerEncoderLayer m(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.0));
    return unary(m, randn({3, 2, 8}));
  });
  add("TransformerEncoderLayerDropout", [] {
    nn::TransformerEncoderLayer m(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.1));
    return unary(m, randn({3, 2, 8}), true);
  });
  add("TransformerDecoderLayer", [] {
    nn::TransformerDecoderLayer m(nn::TransformerDecoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.0));
    return Case{"",
                m.ptr(),
                [m](const Tensors& in) mutable { return Tensors{m->forward(in[0], in[1])}; },
                {randn({3, 2, 8}), randn({4, 2, 8})}};
  });
  add("LlamaBlock", [] { return unary(LlamaBlock(), randn({2, 5, 16})); });
  add("Dropout", [] { return unary(nn::Dropout(0.4), randn({16, 16}), true); });
  add("MaxPool2d", [] { return unary(nn::MaxPool2d(2), randn({2, 3, 8, 8})); });
  add("AvgPool2d", [] {
    return unary(nn::AvgPool2d(nn::AvgPool2dOptions(3).stride(2)), randn({2, 3, 8, 8}));
  });
  add("AdaptiveAvgPool2d", [] {
    return unary(nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions({2, 3})), randn({2, 3, 8, 7}));
  });
  add("Activations", [] {
    return function(
        [](const Tensors& in) {
          const auto& x = in[0];
          return Tensors{x.relu(),  x.sigmoid(),      x.tanh(),         F::gelu(x),     F::silu(x),
                         F::elu(x), F::leaky_relu(x), F::softplus(x),   F::hardtanh(x), F::mish(x),
                         F::glu(x), F::logsigmoid(x), at::hardswish(x), F::selu(x)};
        },
        {randn({4, 6})});
  });
  add("PReLU", [] { return unary(nn::PReLU(nn::PReLUOptions().num_parameters(3)), randn({2, 3, 4})); });
  add("Upsample", [] {
    return unary(nn::Upsample(nn::UpsampleOptions()
                                  .scale_factor(std::vector<double>{2, 2})
                                  .mode(torch::kBilinear)
                                  .align_corners(false)),
                 randn({1, 2, 3, 4}));
  });
  add("PixelShuffle", [] { return unary(nn::PixelShuffle(2), randn({1, 8, 3, 3})); });
  add("Unfold", [] { return unary(nn::Unfold(nn::UnfoldOptions(2)), randn({1, 2, 4, 4})); });
  add("CrossEntropy", [] {
    nn::CrossEntropyLoss m(nn::CrossEntropyLossOptions().ignore_index(3));
    return Case{"",
                m.ptr(),
                [m](const Tensors& in) mutable { return Tensors{m->forward(in[0], in[1])}; },
                {randn({6, 5}), tokens({6}, 5)}};
  });
  add("Losses", [] {
    return function(
        [](const Tensors& in) {
          return Tensors{F::mse_loss(in[0], in[1]),
                         F::smooth_l1_loss(in[0], in[1]),
                         F::l1_loss(in[0], in[1]),
                         F::binary_cross_entropy_with_logits(in[0], in[1].sigmoid()),
                         F::kl_div(in[0].log_softmax(1), in[1].softmax(1)),
                         F::cosine_similarity(in[0], in[1])};
        },
        {randn({4, 5}), randn({4, 5})});
  });
  add("SplitCatStack", [] {
    return function(
        [](const Tensors& in) {
          auto parts = in[0].split(2, 1);
          auto joined = torch::cat({parts[1], parts[0] * 2}, 1);
          auto stacked = torch::stack(joined.unbind(0), 1);
          return Tensors{stacked.chunk(2, 0)[0] * 3, torch::einsum("ij,kj->ik", {in[0], in[0]})};
        },
        {randn({4, 4})});
  });
  add("Indexing", [] {
    return function(
        [](const Tensors& in) {
          auto picked = in[0].index({in[1]});
          auto copy = in[0].clone();
          copy.index_put_({in[1]}, picked * 2);
          copy.select(0, 0).zero_();
          copy.masked_fill_(copy > 1, 0.5);
          return Tensors{copy, in[0].gather(1, in[2]), in[0].index_select(0, in[1]),
                         (in[0] * 0).scatter_add(0, in[3], in[0].narrow(0, 0, 2))};
        },
        {randn({5, 3}), torch::tensor({1, 3}), tokens({5, 2}, 3), tokens({2, 3}, 5)});
  });
  add("InPlaceViews", [] {
    return function(
        [](const Tensors& in) {
          auto y = in[0] * 1;
          auto flat = y.view({-1});
          flat.slice(0, 0, 4).mul_(2);
          y.t().add_(1);
          auto z = in[0] * 1;
          z.transpose_(0, 1);
          z.unsqueeze_(0);
          z.mul_(in[0]);
          return Tensors{y * flat.view({4, 4}), z, in[0].diagonal().clone()};
        },
        {randn({4, 4})});
  });
  add("SortScanReduce", [] {
    return function(
        [](const Tensors& in) {
          const auto& x = in[0];
          return Tensors{std::get<0>(x.topk(2)),
                         std::get<0>(x.sort(1)),
                         x.cumsum(0),
                         torch::where(x > 0, x, x * 2),
                         x.softmax(1).log(),
                         x.norm(),
                         x.std(),
                         x.var(1),
                         std::get<0>(x.max(0)),
                         x.logsumexp(1),
                         x.prod(),
                         x.amax(1),
                         x.mean(0)};
        },
        {randn({4, 4})});
  });
  add("CustomFunction",
      [] { return function([](const Tensors& in) { return Tensors{Square::apply(in[0])}; }, {randn({4})}); });
  add("DoubleBackward", [] {
    return function(
        [](const Tensors& in) {
          auto y = (in[0].sin() * in[0]).sum();
          return Tensors{torch::autograd::grad({y}, {in[0]}, {}, true, true)[0]};
        },
        {randn({4})});
  });
  add("Promotion", [] {
    return function(
        [](const Tensors& in) {
          return Tensors{in[0] * 2.5,
                         in[1] + 1,
                         in[1] * 0.5,
                         in[0] + in[1],
                         in[1] > 1,
                         in[0].to(torch::kDouble) * in[0],
                         in[0].to(torch::kBFloat16) * 3};
        },
        {randn({3, 2}), tokens({3, 2}, 5)});
  });
  return entries;
}

}  // namespace

const std::vector<Entry>& all() {
  static const std::vector<Entry> entries = build();
  return entries;
}

at::Tensor loss_of(const Tensors& outputs) {
  at::Tensor total;
  for (const at::Tensor& output : outputs) {
    if (!output.is_floating_point() || !output.requires_grad()) continue;
    const auto pattern =
        torch::arange(output.numel(), output.options().requires_grad(false)).reshape(output.sizes()).fmod(7) *
            0.25 -
        0.5;
    const auto part = (output * pattern).sum().to(torch::kFloat);
    total = total.defined() ? total + part : part;
  }
  return total;
}

}  // namespace penstock::zoo
