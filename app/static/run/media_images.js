// Pictures, videos, documents and texts that a run logged.
import { number } from 'formats'

const BYTES = 65_536 // of a text

/** @typedef {import('media').MediaFile} MediaFile */
/** @typedef {import('media').MediaCard} MediaCard */

const CAPTION = '.caption.txt'
/** @param {string} name @returns {string} */
const withoutEnding = (name) => name.replace(/\.caption\.txt$|\.\w+$/, '')

/** Return a note in place of a missing file. */
export const missing = () =>
  Object.assign(document.createElement('span'), { className: 'missing', textContent: 'Not on the server' })

/** A picture that opens large; its box stays if the server lacks it. @param {MediaFile} file */
export const thumbnail = ({ address, name, step }) => {
  if (!address) return missing()
  const button = Object.assign(document.createElement('button'), { type: 'button', className: 'ghost picture' })
  button.setAttribute('aria-label', `Enlarge ${name} of step ${step}`)
  const image = Object.assign(document.createElement('img'), { alt: '', loading: 'lazy', src: address })
  image.addEventListener('error', () => button.replaceWith(missing()))
  button.append(image)
  return button
}

/** @param {MediaFile} file */
export const isCaption = ({ name }) => name.endsWith(CAPTION)

/** The caption of a file, empty until it is read; '' if it has none. @param {MediaFile} file @param {MediaFile[]} all */
export const captionOf = (file, all) => {
  const stem = withoutEnding(file.name)
  const found = all.find((each) => isCaption(each) && withoutEnding(each.name) === stem)
  if (!found?.address) return ''
  const caption = document.createElement('figcaption')
  fetch(found.address)
    .then((answer) => answer.text())
    .then((text) => Object.assign(caption, { textContent: text, title: text }))
    .catch(() => {})
  return caption
}

/** @param {MediaCard} card @returns {import('media').ShowMedia} */
export const createImages = ({ body, say }) => {
  const shots = Object.assign(document.createElement('div'), { className: 'shots' })
  return (files) => {
    const pictures = files.filter((file) => !isCaption(file))
    shots.classList.toggle('one', pictures.length === 1)
    shots.replaceChildren(
      ...pictures.map((file) => {
        const figure = document.createElement('figure')
        figure.append(thumbnail(file), captionOf(file, files))
        return figure
      }),
    )
    body.replaceChildren(shots)
    say(pictures.length > 1 ? number(pictures.length) : '')
  }
}

/** @param {MediaCard} card @returns {import('media').ShowMedia} */
export const createText = ({ name, body, say }) => {
  const text = Object.assign(document.createElement('pre'), { tabIndex: 0 })
  text.setAttribute('role', 'region')
  text.setAttribute('aria-label', `Text ${name}`)
  let shown = ''
  return async ([{ address }]) => {
    shown = address
    if (!address) return body.replaceChildren(missing())
    const answer = await fetch(address, { headers: { Range: `bytes=0-${BYTES - 1}` } })
    const content = answer.ok ? await answer.text() : 'The file cannot be read.'
    if (shown !== address) return
    text.textContent = content
    body.replaceChildren(text)
    say(Number(answer.headers.get('Content-Range')?.split('/')[1] ?? 0) > BYTES ? 'the beginning' : '')
  }
}

/** @param {MediaCard} card @returns {import('media').ShowMedia} */
export const createVideo =
  ({ body }) =>
  ([{ address, name }]) => {
    if (!address) return body.replaceChildren(missing())
    const video = Object.assign(document.createElement('video'), { controls: true, preload: 'metadata', src: address })
    video.setAttribute('aria-label', `Video ${name}`)
    video.addEventListener('error', () => video.replaceWith(missing()))
    body.replaceChildren(video)
  }

/**
 * A document of a script, in a frame that runs nothing.
 * @param {MediaCard} card
 * @returns {import('media').ShowMedia}
 */
export const createDocument =
  ({ body }) =>
  ([{ address, name }]) => {
    if (!address) return body.replaceChildren(missing())
    const frame = Object.assign(document.createElement('iframe'), { src: address, title: `Document ${name}` })
    frame.setAttribute('sandbox', '')
    body.replaceChildren(frame)
  }
