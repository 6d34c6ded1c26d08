"""The residual network for CIFAR-10 of He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2.

6n + 2 layers with weights: a convolution, three stages of n blocks with 16, 32 and 64 filters, and a dense layer. It is
version 1 (normalized after each convolution, rectified after each sum), with shortcuts of option A: at the start of a
stage, the shortcut skips every other pixel and adds channels of zeros, so it has no weights. Convolutions have no
biases. Depth 56 (n = 9) has 853,018 trainable weights.
"""

import keras
from keras import layers


def resnet(depth: int = 56) -> keras.Model:
    """From images, 32 x 32 x 3 numbers each, to 10 logits."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth {depth}: must be 6n + 2, such as 8, 20, 56 or 110")
    keras.utils.set_random_seed(0)
    images = keras.Input((32, 32, 3))
    x = layers.ReLU()(_normal(_convolution(16)(images)))
    for filters in (16, 32, 64):
        for number in range((depth - 2) // 6):
            x = _block(x, filters, stride=2 if filters > 16 and number == 0 else 1)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _block(x: keras.KerasTensor, filters: int, stride: int) -> keras.KerasTensor:
    shortcut = x
    if stride > 1:
        added = filters - x.shape[-1]
        shortcut = keras.ops.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (added // 2, added - added // 2)))
    x = layers.ReLU()(_normal(_convolution(filters, stride)(x)))
    x = _normal(_convolution(filters)(x))
    return layers.ReLU()(layers.Add()([x, shortcut]))


def _convolution(filters: int, stride: int = 1) -> layers.Layer:
    return layers.Conv2D(filters, 3, stride, "same", use_bias=False, kernel_initializer="he_normal")


def _normal(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
